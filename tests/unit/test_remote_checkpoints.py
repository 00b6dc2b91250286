"""Checkpoints at addresses: a real S3 server (moto's), memory://, and faults of a store that are repeated or named."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint import batches, bits, make, train

import unisono as un
from unisono.training.checkpoint import CheckpointError, behind, remote
from unisono.training.checkpoint.remote import RemoteError, RemotePath, find_place
from unisono.world import World
from unisono.world.virtual import run_threads

pytest.importorskip("s3fs")


class Faults:
    """Between the server and its clients: `answer(method, path)` gives a status to answer with, or None."""

    def __init__(self, application: Callable[..., Any]) -> None:
        self.application, self.answer, self.fired = application, None, 0
        self.lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        with self.lock:
            status = self.answer and self.answer(environ["REQUEST_METHOD"], environ["PATH_INFO"])
            self.fired += bool(status)
        if status:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(f"{status} Fault", [("Content-Length", "0")])
            return [b""]
        return self.application(environ, start_response)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Faults]]:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    faults = Faults(DomainDispatcherApplication(create_backend_app))
    httpd = make_server("127.0.0.1", 0, faults, threaded=True)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}", faults
    httpd.shutdown()
    thread.join()


@pytest.fixture
def bucket(server, monkeypatch) -> Iterator[tuple[str, Faults, Any]]:
    """A new bucket's address, the faults between it and us, and its driver."""
    import s3fs

    address, faults = server
    for name, value in {
        "AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true", "AWS_MAX_ATTEMPTS": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "_BACKOFF_S", 0.001)
    monkeypatch.setattr(behind, "_POLL_REMOTE_S", 0.01)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    driver = s3fs.S3FileSystem(use_listings_cache=False)
    number = len(driver.ls(""))
    driver.mkdir(f"bucket-{number}")
    yield f"s3://bucket-{number}/run", faults, driver
    faults.answer = None
    s3fs.S3FileSystem.clear_instance_cache()


def save_steps(world: World, path: str, *, strategy: str = "allreduce", background: bool, count: int = 2) -> bytes:
    replica = make(world, strategy)
    for batch in batches(count):
        train(replica, [batch])
        un.save(path, replica, background=background, extra={"rank": world.rank}, keep=1)
    un.wait_saved(replica)
    state = str(sorted(bits_of(replica).items())).encode()
    replica.close()
    return state


def bits_of(replica: un.Replica) -> dict[str, bytes]:
    return {name: x.numpy().tobytes() for name, x in replica.consolidate().state_dict().items()}


def load(world: World, path: str, strategy: str = "allreduce") -> tuple[bytes, int, Any]:
    replica = make(world, strategy)
    loaded = un.load(path, replica)
    state = str(sorted(bits_of(replica).items())).encode()
    replica.close()
    return state, loaded.step, loaded.extra


# Whole runs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("strategy", "size"), [("allreduce", 1), ("allreduce", 3), ("zero(stage=3)", 2)])
def test_what_is_saved_to_a_bucket_comes_back(bucket, strategy, size, background):
    path = bucket[0]
    saved = run_threads(lambda w: save_steps(w, path, strategy=strategy, background=background), size)
    found = run_threads(lambda w: load(w, path, strategy), size)
    assert [(state, step) for state, step, _ in found] == [(state, 2) for state in saved]
    assert [extra["rank"] for *_, extra in found] == list(range(size))
    other = run_threads(lambda w: load(w, path, "allreduce"), 2)
    assert {state for state, *_ in other} == {saved[0]}
    assert un.read_checkpoint(path)["step"] == 2
    names = [name.rpartition("/")[2] for name in bucket[2].ls(path)]
    assert len(names) == 1  # keep
    assert all(name.startswith("step-000000000") for name in names)


def test_memory_and_file_addresses_and_one_checkpoint_by_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(behind, "_POLL_REMOTE_S", 0.01)
    for path in ("memory://runs/a", f"file://{tmp_path}/run", Path(f"file:{tmp_path}/path")):
        replica = make()
        train(replica, batches(1))
        made = un.save(path, replica, background=True)
        un.wait_saved()
        other = make()
        assert un.load(path, other).step == un.load(made, make()).step == 1
        assert bits(other) == bits(replica)
    assert (tmp_path / "run" / "step-0000000001" / "manifest.json").exists()
    with pytest.raises(FileNotFoundError, match="no checkpoint at memory://runs/none"):
        un.load("memory://runs/none", make())


def test_the_trainer_saves_to_an_address_and_resumes(bucket):
    def fit(epochs: int) -> list[float]:
        model = torch.nn.Linear(3, 1)
        torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = un.Trainer(
            model, optimizer, loss=torch.nn.MSELoss(), checkpoint=bucket[0], progress=False, world=World()
        )
        x = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
        return trainer.fit((x, x.sum(1, keepdim=True)), epochs=epochs, batch_size=8)["loss"]

    first = fit(1)
    assert fit(2)[:1] == first


# A checkpoint is whole or not there ---------------------------------------------------------------------------


def test_half_a_checkpoint_is_never_shown(bucket):
    """What a listing shows of a save under way, or too late, or not at all, is never taken for a checkpoint."""
    path, _, driver = bucket
    replica = make()
    first = un.save(path, replica)
    replica.step = 7
    second = un.save(path, replica)
    inside = second.removeprefix("s3://")
    manifest = driver.cat_file(f"{inside}/manifest.json")
    files = [f"{inside}/{name}" for name in json.loads(manifest)["files"]]
    driver.rm_file(f"{inside}/manifest.json")  # not written yet
    assert un.load(path, make()).path == first
    assert un.load(path, make()).skipped == []
    driver.pipe_file(f"{inside}/manifest.json", manifest)
    kept = driver.cat_file(files[0])
    driver.rm_file(files[0])  # the manifest is visible before another object
    with pytest.warns(UserWarning, match="is missing"):
        assert un.load(path, make()).path == first
    driver.pipe_file(files[0], kept[:-1])
    with pytest.warns(UserWarning, match="bytes"):
        assert un.load(path, make()).path == first
    driver.pipe_file(files[0], kept)
    assert un.load(path, make()).path == second


def test_a_listing_that_lags_behind_hides_whole_checkpoints_alone(bucket, monkeypatch):
    path, _, _ = bucket
    replica = make()
    first = un.save(path, replica)
    shown = RemotePath.list_names(find_place(path))
    replica.step = 5
    second = un.save(path, replica)
    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "list_names", lambda self: shown)
        assert un.load(path, make()).path == first
    assert un.load(path, make()).path == second
    assert un.load(second, make()).step == 5  # by its own address no listing is asked


def test_what_a_died_save_left_is_removed_after_a_day_and_not_before(bucket, monkeypatch):
    path, _, driver = bucket
    replica = make()
    un.save(path, replica)
    driver.pipe_file(f"{path}/step-0000000009-abcd/shared.json", b"half")
    driver.pipe_file(f"{path}/step-0000000009-abcd/.begun", b"1000.0")
    driver.pipe_file(f"{path}/step-0000000010-abcd/.begun", b"99999999999.0")
    un.save(path, replica)
    names = [name.rpartition("/")[2] for name in driver.ls(path)]
    assert "step-0000000009-abcd" not in names
    assert "step-0000000010-abcd" in names


# Faults -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "background"), [("PUT", False), ("POST", True), ("GET", False), ("HEAD", True)])
def test_errors_of_the_server_are_repeated_until_it_works(bucket, method, background):
    path, faults, _ = bucket
    counts: dict[str, int] = {}

    def answer(asked: str, where: str) -> int | None:
        if asked != method or "/run/" not in where:
            return None
        counts[where] = counts.get(where, 0) + 1
        return 503 if counts[where] <= 2 else None

    faults.answer = answer
    saved = run_threads(lambda w: save_steps(w, path, background=background, count=1), 2)
    assert [state for state, *_ in run_threads(lambda w: load(w, path), 2)] == saved
    assert faults.fired


@pytest.mark.parametrize("background", [False, True])
def test_a_store_that_stays_broken_is_named_with_the_attempts_and_the_former_is_whole(bucket, background):
    path, faults, _ = bucket
    before = run_threads(lambda w: save_steps(w, path, background=background, count=1), 2)
    faults.answer = lambda method, where: 500 if method in ("PUT", "POST") and "safetensors" in where else None

    def work(world: World) -> None:
        replica = make(world)
        replica.step = 4
        begun = un.save(path, replica, background=True) if background else ""
        with pytest.raises(
            CheckpointError, match=rf"writing {path}/step-0000000004.* failed 6 times in \d+ s, the last"
        ):
            un.wait_saved(replica) if begun else un.save(path, replica)
        replica.close()

    run_threads(work, 2)
    faults.answer = None
    assert [state for state, *_ in run_threads(lambda w: load(w, path), 2)] == before


@pytest.mark.parametrize("gone", ["at the start", "in mid-run"])
def test_a_bucket_that_is_gone_is_named(bucket, gone):
    path, _, driver = bucket
    replica = make()
    if gone == "in mid-run":
        un.save(path, replica)
        driver.rm(path.removesuffix("/run"), recursive=True)
    else:
        path = "s3://not-there/run"
    name = path.split("/")[2]
    with pytest.raises(CheckpointError, match=f"no checkpoint was written to {path}.*there is no s3://{name}"):
        un.save(path, replica, background=True)
    with pytest.raises(CheckpointError, match=f"{path} could not be read: .*there is no s3://{name}"):
        un.load(path, replica)  # not FileNotFoundError, which a loop takes for its first start


def test_a_bucket_that_goes_while_it_is_written_to_is_named_by_what_comes_next(bucket, monkeypatch):
    path, faults, _ = bucket
    replica = make()
    un.save(path, replica, background=True)
    un.wait_saved()
    removed = []

    def answer(method: str, where: str) -> int | None:
        if method in ("PUT", "POST") and "shared" in where and not removed:
            removed.append(where)
        return 404 if removed and method in ("PUT", "POST") else None

    faults.answer = answer
    replica.step = 3
    un.save(path, replica, background=True)
    with pytest.raises(CheckpointError, match=rf"step 3 in {path} could not be written in the background.*not exist"):
        un.save(path, replica, background=True)
    faults.answer = None
    assert un.load(path, make()).step == 0


def test_missing_credentials_are_named_with_the_remedy(bucket, monkeypatch):
    import s3fs

    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", "/nonexistent")
    s3fs.S3FileSystem.clear_instance_cache()
    for call in (lambda: un.save(bucket[0], make()), lambda: un.load(bucket[0], make())):
        with pytest.raises(CheckpointError, match=rf"{bucket[0]}.* no credentials for s3:// here .*AWS_ACCESS_KEY_ID"):
            call()


def test_a_full_disk_is_not_tried_again(monkeypatch):
    place = find_place("memory://full/run/x")
    calls = []

    def full(*args: object, **options: object) -> None:
        calls.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(type(place._driver), "pipe_file", full)
    with pytest.raises(RemoteError, match=r"writing memory://full/run/x failed for good: .*No space left"):
        place.write_bytes(b"x")
    assert len(calls) == 1


def test_timeouts_are_repeated_and_what_was_sent_in_part_is_discarded(monkeypatch):
    monkeypatch.setattr(remote, "_BACKOFF_S", 0.001)
    place = find_place("memory://slow/x")
    made = []

    def parts() -> Iterator[bytes]:
        made.append(1)
        yield b"begin"
        if len(made) < 3:
            raise TimeoutError("the read operation timed out")
        yield b"end"

    assert place.write(parts)[0] == 8
    assert (len(made), place.read_bytes(), place.read_bytes(2, 4)) == (3, b"beginend", b"gi")


def test_an_unknown_scheme_or_driver_is_refused_by_name(monkeypatch):
    with pytest.raises(ValueError, match="nothing://run has the scheme nothing, which fsspec does not know"):
        un.save("nothing://run", make())
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"s3://a/b is reached through fsspec: pip install 'unisono\[remote\]'"
    ):
        un.load("s3://a/b", make())
