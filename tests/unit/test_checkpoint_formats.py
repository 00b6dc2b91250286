"""From every format into every other: each cell of the matrix in docs/checkpoints.md, and what is refused."""

from __future__ import annotations

import copy
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from test_checkpoint import batches, make, net, train
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import unisono as un
from unisono import cli
from unisono.training.checkpoint import CheckpointError
from unisono.training.checkpoint.dcp import read_dcp
from unisono.training.checkpoint.slices import list_runs
from unisono.world import World
from unisono.world.virtual import run_threads

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # said by torch's own dcp.save

FROM = {  # how, and whether it has the optimizer too
    "un.save allreduce": True,
    "un.save zero": True,
    "dcp": True,
    "dcp flattened": True,
    "dcp bare": False,
    "huggingface": False,
    "huggingface sharded": False,
    "safetensors": False,
    "torch.save": True,
    "torch.save bare": False,
}


@pytest.fixture(scope="module")
def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The reference: a model that plain PyTorch has trained for three steps."""
    model = net(norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in batches(3):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def sources(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same state in every format, written by the libraries that the formats are of."""
    root = tmp_path_factory.mktemp("formats")
    model, optimizer = trained
    found = {name: root / name.replace(" ", "-") for name in FROM}

    def save(world: World, name: str, strategy: str) -> None:
        replica = make(world, strategy, norm=True)
        train(replica, batches(3))
        un.save(found[name], replica)
        replica.close()

    run_threads(lambda world: save(world, "un.save allreduce", "allreduce"), 2)
    run_threads(lambda world: save(world, "un.save zero", "zero(stage=3)"), 2)
    for name, flat in (("dcp", False), ("dcp flattened", True)):
        states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
        state = {"model": states[0], "optimizer": states[1], "step": torch.tensor(3) if flat else 3}
        dcp.save(state, checkpoint_id=found[name], no_dist=True)
    dcp.save(dict(model.state_dict()), checkpoint_id=found["dcp bare"], no_dist=True)
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    for name in ("huggingface", "huggingface sharded"):
        found[name].mkdir()
        (found[name] / "config.json").write_text('{"model_type": "net"}')
        (found[name] / "tokenizer.json").write_text("{}")
    save_file(weights, found["huggingface"] / "model.safetensors", metadata={"format": "pt"})
    names = sorted(weights)
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({n: weights[n] for n in names if places[n] == file}, found["huggingface sharded"] / file)
    index = {"metadata": {}, "weight_map": places}
    (found["huggingface sharded"] / "model.safetensors.index.json").write_text(json.dumps(index))
    found["safetensors"] = found["safetensors"].with_suffix(".safetensors")
    save_file(weights, found["safetensors"])
    found["torch.save"] = root / "both.pt"
    torch.save(
        {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "step": 3},
        root / "both.pt",
    )
    found["torch.save bare"] = root / "bare.pth"
    torch.save({f"module.{name}": x for name, x in model.state_dict().items()}, root / "bare.pth")
    return found


def check_model(state: Any, trained: Any, *, exactly: bool = True) -> None:
    for name, value in trained[0].state_dict().items():
        torch.testing.assert_close(state[name], value, **({"rtol": 0, "atol": 0} if exactly else {}))
    assert set(state) == set(trained[0].state_dict())


def check_optimizer(state: Any, trained: Any, *, exactly: bool = True) -> None:
    right = trained[1].state_dict()
    assert [group["params"] for group in state["param_groups"]] == [group["params"] for group in right["param_groups"]]
    assert state["param_groups"][0]["lr"] == right["param_groups"][0]["lr"]
    assert state["state"].keys() == right["state"].keys()
    for number, entry in right["state"].items():
        for key, value in entry.items():
            got = torch.as_tensor(state["state"][number][key])
            torch.testing.assert_close(got, value, **({"rtol": 0, "atol": 0} if exactly else {}))


def is_exact(name: str) -> bool:
    return not name.startswith("un.save")  # two workers have trained that one: to rounding


# Every cell -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FROM)
@pytest.mark.parametrize(
    ("strategy", "size"), [("allreduce", 1), ("allreduce", 2), ("zero(stage=3)", 2), ("local_sgd", 2)]
)
def test_into_training(name, strategy, size, sources, trained):
    """Loaded, and a step further: as plain PyTorch goes on (without the optimizer, as with a new one)."""
    path = sources[name]
    if strategy == "local_sgd" and name.startswith("un.save"):
        with pytest.raises(ValueError, match="of a strategy that keeps no anchors"):
            run_threads(lambda world: un.load(path, make(world, strategy, norm=True)), size)
        return

    def work(world: World) -> tuple[dict[str, torch.Tensor], int, dict[str, torch.Tensor]]:
        replica = make(world, strategy, norm=True)
        loaded = un.load(path, replica)
        before = {k: x.clone() for k, x in replica.consolidate().state_dict().items()}
        train(replica, batches(1, seed=5))
        after = {k: x.clone() for k, x in replica.consolidate().state_dict().items()}
        replica.close()
        return before, loaded.step, after

    model = net(norm=True)
    model.load_state_dict(trained[0].state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if FROM[name]:
        optimizer.load_state_dict(copy.deepcopy(trained[1].state_dict()))
    x, y = batches(1, seed=5)[0]
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    for before, step, after in run_threads(work, size):
        check_model(before, trained, exactly=is_exact(name))
        assert step == (3 if FROM[name] else 0)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(after[key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", FROM)
def test_into_plain_pytorch(name, sources, trained):
    state = un.read_checkpoint(sources[name])
    model = {k.removeprefix("module."): x for k, x in state["model"].items()}
    check_model(model, trained, exactly=is_exact(name))
    if FROM[name]:
        check_optimizer(state["optimizer"], trained, exactly=is_exact(name))
        assert state["step"] == 3
    else:
        assert state["optimizer"] is None


@pytest.mark.parametrize("name", FROM)
def test_into_dcp(name, sources, trained, tmp_path):
    """As torch.distributed.checkpoint itself loads it into a new model and optimizer."""
    un.export(sources[name], tmp_path / "out", "dcp")
    model = net(norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    if name == "torch.save bare":
        saved = {f"module.{key}": torch.zeros_like(x) for key, x in model.state_dict().items()}
        dcp.load({"model": saved}, checkpoint_id=tmp_path / "out", no_dist=True)
        check_model({k.removeprefix("module."): x for k, x in saved.items()}, trained)
        return
    states = get_state_dict(model, optimizer)
    target = {"model": states[0]} | ({"optimizer": states[1]} if FROM[name] else {})
    dcp.load(target, checkpoint_id=tmp_path / "out", no_dist=True)
    if FROM[name]:
        set_state_dict(model, optimizer, model_state_dict=target["model"], optim_state_dict=target["optimizer"])
        check_optimizer(optimizer.state_dict(), trained, exactly=is_exact(name))
    else:
        model.load_state_dict(target["model"])
    check_model(model.state_dict(), trained, exactly=is_exact(name))


@pytest.mark.parametrize("name", FROM)
def test_into_huggingface(name, sources, trained, tmp_path):
    done = un.export(sources[name], tmp_path / "out", "huggingface", dtype=torch.bfloat16, shard_size=200)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = {file: load_file(tmp_path / "out" / file) for file in set(index["weight_map"].values())}
    assert len(files) > 1
    state = {key.removeprefix("module."): files[file][key] for key, file in index["weight_map"].items()}
    assert done.tensors == len(state) == len(trained[0].state_dict())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in state.values())
    for key, value in trained[0].state_dict().items():
        right = value.to(torch.bfloat16) if value.is_floating_point() else value
        torch.testing.assert_close(state[key], right)
    assert (tmp_path / "out" / "config.json").exists() == name.startswith("huggingface")
    assert (tmp_path / "out" / "tokenizer.json").exists() == name.startswith("huggingface")


@pytest.mark.parametrize("name", FROM)
def test_into_one_safetensors_file(name, sources, trained, tmp_path):
    un.export(sources[name], tmp_path / "out.safetensors")
    state = {key.removeprefix("module."): x for key, x in load_file(tmp_path / "out.safetensors").items()}
    check_model(state, trained, exactly=is_exact(name))


# From a replica ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["dcp", "huggingface", "safetensors"])
@pytest.mark.parametrize(("strategy", "size"), [("allreduce", 1), ("zero(stage=3)", 2)])
def test_a_replica_is_exported_as_it_is(tmp_path, trained, strategy, size, form):
    out = tmp_path / ("out.safetensors" if form == "safetensors" else "out")

    def work(world: World) -> Any:
        replica = make(world, strategy, norm=True)
        train(replica, batches(3))
        done = un.export(replica, out, form)
        replica.close()
        return done

    assert len({str(done) for done in run_threads(work, size)}) == 1
    check_model(un.read_checkpoint(out)["model"], trained, exactly=False)
    assert os.listdir(tmp_path) == [out.name]


def test_groups_in_another_order_than_the_model_keep_their_names(tmp_path):
    """As with weight decay for matrices alone; our numbers and the names of dcp are told apart."""
    model = net()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    replica = un.parallel(model, optimizer, world=World())
    train(replica, batches(2))
    un.save(tmp_path / "ours", replica)
    un.export(tmp_path / "ours", tmp_path / "dcp", "dcp")
    found = read_dcp(tmp_path / "dcp")["optimizer"]
    names = dict(model.named_parameters())
    for name, state in found["state"].items():
        assert torch.equal(state["exp_avg"].full(), optimizer.state[names[name]]["exp_avg"])
    assert [group["weight_decay"] for group in found["param_groups"]] == [0.1, 0.0]
    back = un.read_checkpoint(tmp_path / "dcp")["optimizer"]
    right = optimizer.state_dict()
    assert [g["params"] for g in back["param_groups"]] == [g["params"] for g in right["param_groups"]]
    for number, entry in right["state"].items():
        assert torch.equal(back["state"][number]["exp_avg"], entry["exp_avg"])


def test_blocks_of_any_shape_are_put_together(tmp_path):
    """A tensor that torch has cut by rows and columns, as FSDP2 with tensor parallelism does."""
    whole = torch.arange(24.0).reshape(4, 6)
    length, starts = list_runs((4, 6), (2, 3), (2, 3))
    assert [whole.reshape(-1)[s : s + length].tolist() for s in starts] == whole[2:, 3:].tolist()
    assert list_runs((4, 6), (2, 6), (1, 0)) == (12, [6])
    assert list_runs((), (), ()) == (1, [0])


# What is refused --------------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


@pytest.mark.parametrize("what", ["metadata", "item", "torch"])
def test_no_code_is_run_from_what_others_have_saved(tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "x"
    if what == "torch":
        folder = tmp_path / "x.pt"
        torch.save({"model": {"w": torch.ones(2)}, "more": Evil()}, folder)
    else:
        state = {"model": {"w": torch.ones(2)}, "step": Evil() if what == "item" else 1}
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        if what == "metadata":
            (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    for call in (lambda: un.read_checkpoint(folder), lambda: un.load(folder, make())):
        with pytest.raises((CheckpointError, ValueError), match=r"x.*(running code|run code|does not write there)"):
            call()
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(("damage", "said"), [("cut", "cannot be read|cut short"), ("gone", "No such file")])
def test_damaged_files_of_others_are_named(tmp_path, damage, said):
    dcp.save({"model": {"w": torch.ones(200)}}, checkpoint_id=tmp_path / "x", no_dist=True)
    [file] = (tmp_path / "x").glob("*.distcp")
    os.truncate(file, 300) if damage == "cut" else file.unlink()
    with pytest.raises((CheckpointError, ValueError, OSError), match=said):
        un.read_checkpoint(tmp_path / "x")
    (tmp_path / "model.safetensors").write_bytes(b"xx")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is cut short"):
        un.read_checkpoint(tmp_path)


def test_a_model_that_does_not_fit_is_named_as_with_our_own(tmp_path):
    save_file({"0.weight": torch.zeros(3, 3)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"'0.weight' has shape \(3, 3\) there, \(8, 5\) in the model"):
        un.load(tmp_path / "x.safetensors", make(), strict=False)


def test_mistakes_of_the_caller_are_named(tmp_path, sources):
    source = sources["safetensors"]
    with pytest.raises(ValueError, match="format is None"):
        un.export(source, tmp_path / "out")
    with pytest.raises(ValueError, match="dtype is for weights alone"):
        un.export(source, tmp_path / "out", "dcp", dtype=torch.float16)
    with pytest.raises(ValueError, match=r"has no config.json: like="):
        un.export(source, tmp_path / "out", "huggingface", like=tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="out exists"):
        un.export(source, tmp_path / "out", "huggingface")
    un.export(source, tmp_path / "out", "huggingface", overwrite=True, like=sources["huggingface"])
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert os.listdir(tmp_path) == ["out"]


def test_a_config_of_transformers_is_kept_and_its_model_loads(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    replica = un.parallel(model, torch.optim.AdamW(model.parameters()), world=World())
    un.export(replica, tmp_path / "out", "huggingface", shard_size="2KB")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    other = transformers.GPT2LMHeadModel(config)
    un.load(tmp_path / "out", un.parallel(other, torch.optim.AdamW(other.parameters()), world=World()))
    assert torch.equal(other.transformer.wte.weight, model.transformer.wte.weight)


def test_the_command_line_exports_each_format(tmp_path, sources, capsys):
    assert (
        cli.main(["export", str(sources["dcp"]), str(tmp_path / "hf"), "--format", "huggingface", "--dtype", "bf16"])
        == 0
    )
    assert "bf16" not in capsys.readouterr().err
    assert load_file(tmp_path / "hf" / "model.safetensors")["0.weight"].dtype == torch.bfloat16
    assert cli.main(["export", str(tmp_path / "hf"), str(tmp_path / "dcp"), "--format", "dcp"]) == 0
    assert (tmp_path / "dcp" / ".metadata").exists()
