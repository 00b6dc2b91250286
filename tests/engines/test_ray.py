"""Real Ray: the same program as local, its data where it lies, losses, MapReduce on actors, and boosting."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from boost_functions import NAMES, check_model, table
from engine_cases import EVERYTHING, NETWORKED, check_network, network_options, right_loss, specs
from engine_commands import Command, only, unisono_run
from engine_functions import (
    ROWS,
    descend,
    fail_on_rank_1,
    gradient_and_place,
    kill_the_engines_process,
    shares,
)

import unisono as un
from unisono.tables.map_reduce import mapreduce

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'unisono[ray]'")
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]  # Ray's own warnings are not ours


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[str]:
    """A Ray on this host with room for three workers; its address."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # of another priority than the fork server, its workers would be fresh
        ray.init(address="local", num_cpus=3, include_dashboard=False, logging_level="error", log_to_driver=False)
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()


@pytest.fixture(scope="module")
def dataset() -> Any:
    """y = 0, 1, ... in three blocks of different sizes, with a vector and a text beside."""
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = [{"y": float(i), "x": np.full(2, i, dtype=np.float32)} for i in range(ROWS)]
    return ray.data.from_items(rows, override_num_blocks=3)


def test_the_same_program_has_the_same_loss_and_every_strategy_runs(command: Command, cluster: str) -> None:
    wanted = specs()
    options = ("--on", "ray", "--address", cluster, "-n", "2", "script.py", json.dumps(wanted))
    found = only(command(*unisono_run(*options), script=EVERYTHING))
    assert found["loss"] == pytest.approx(right_loss(), rel=1e-12)
    assert found["size"] == 2
    assert set(found["strategies"]) == set(wanted)
    assert all(0 < loss < 20 for loss in found["strategies"].values())


def test_interface_ports_and_encryption_are_the_users(command: Command, cluster: str) -> None:
    words = unisono_run("--on", "ray", "--address", cluster, "-n", "2", *network_options(), "script.py")
    ended = command(*words, script=NETWORKED, env={"UNISONO_SHARED_MEMORY": "0"})
    assert ended.status == 0, ended
    check_network(ended.json())


def test_an_error_arrives_as_one_report() -> None:
    with pytest.raises(un.WorkerError, match=r"worker 1 of 2 failed: KeyError") as caught:
        un.launch(fail_on_rank_1, workers=2, on=un.on.ray())
    assert (caught.value.rank, caught.value.exit_status) == (1, 1)
    assert "KeyError: 'no such column'" in str(caught.value)
    assert str(caught.value).count("Traceback") == 1


def test_a_lost_actor_ends_in_one_report(tmp_path: Path) -> None:
    with pytest.raises(un.WorkerError, match=r"worker 1 of 2 failed: connection lost") as caught:
        un.launch(kill_the_engines_process, workers=2, args=(str(tmp_path / "flag"),), on=un.on.ray())
    assert caught.value.rank == 1


def test_a_lost_actor_is_replaced_and_all_meet_anew(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = un.launch(kill_the_engines_process, workers=2, args=(str(tmp_path / "flag"),), on=un.on.ray(max_restarts=1))
    assert [rank for rank, _ in found] == [0, 1]
    assert len({attempt for _, attempt in found}) == 1
    assert "all workers start again (restart 1 of 1)" in capfd.readouterr().err


def test_too_few_slots_are_named_at_once() -> None:
    with pytest.raises(un.EngineError, match=r"too few slots for 4 workers: CPU: 4 needed \(1 a worker\), 3 there"):
        un.launch(fail_on_rank_1, workers=4, on=un.on.ray(wait_s=0.1))


def test_slots_in_use_are_told_from_slots_that_are_missing() -> None:
    from ray.util import placement_group, remove_placement_group

    taken = placement_group([{"CPU": 2}])
    assert taken.wait(30)
    with pytest.raises(un.EngineError, match=r"no room for 3 workers within 0.1 s: CPU: 3 needed .* 1 there"):
        un.launch(fail_on_rank_1, workers=3, on=un.on.ray(wait_s=0.1))
    remove_placement_group(taken)


def test_datasets_are_read_where_they_lie(dataset: Any) -> None:
    import ray.data

    check = ray.data.from_items([{"t": f"text {i}"} for i in range(3)])
    found = un.launch(shares, workers=2, args=(dataset, check), on=un.on.ray())
    seen = [y for worker in found for values, weight in worker["batches"] if weight for y in values]
    assert sorted(seen) == [float(i) for i in range(ROWS)]  # each row once
    assert sum(worker["rows"] for worker in found) == ROWS
    assert all(0 < worker["rows"] < ROWS for worker in found)
    sizes = [sum(len(worker["batches"][i][0]) for worker in found) for i in range(len(found[0]["batches"]))]
    assert sizes == [4, 4, 4, 4, 4, 2]
    assert [sum(worker["batches"][i][1] for worker in found) for i in range(6)] == pytest.approx([2.0] * 6)
    # Unequal parts train as the whole table would.
    assert found[0]["rows"] != found[1]["rows"]
    assert [worker["mean"] for worker in found] == pytest.approx([np.mean(range(ROWS))] * 2, rel=1e-12)
    # A row is its columns, and a second table arrives beside the first.
    rows = sorted((row["y"], row["x"].tolist()) for worker in found for row in worker["samples"][0])
    assert rows == [(float(i), [float(i)] * 2) for i in range(ROWS)]
    assert sorted(row["t"] for worker in found for row in worker["samples"][1]) == ["text 0", "text 1", "text 2"]


def test_mapreduce_is_gradient_descent_on_actors_that_keep_their_part_and_makes_a_lost_one_again(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(1000, 3)), np.array([1.0, -2.0, 3.0])
    where: list[Any] = []

    def update(state: Any, reduced: Any) -> Any:
        where.append(reduced[1])
        return state[0] - reduced[0] / 1000, str(tmp_path / f"flag-{len(where)}")

    found, _ = mapreduce(
        gradient_and_place, lambda a, b: (a[0] + b[0], a[1] + b[1]), (x, x @ w),
        state=(np.zeros(3), str(tmp_path / "flag-0")), update=update, rounds=6, workers=2, on=un.on.ray(),
    )  # fmt: skip
    assert found == pytest.approx(descend(x, x @ w, 6), rel=1e-12)
    assert (tmp_path / "flag-2").exists()
    assert where[0] == where[1]
    assert all(places == where[-1] for places in where[2:])
    assert len({pid for pid, _ in where[0]}) == len({pid for pid, _ in where[-1]}) == 2
    assert len(set(where[0]) & set(where[-1])) == 1  # the other actor kept its part


# -- boosting ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows() -> Any:
    """A Dataset to learn from, in three blocks."""
    import ray.data

    pytest.importorskip("xgboost", reason="XGBoost is not installed: pip install 'unisono[boost]'")
    ray.data.DataContext.get_current().enable_progress_bars = False
    x, y = table()
    found = [{**dict(zip(NAMES, row, strict=True)), "y": target} for row, target in zip(x.tolist(), y, strict=True)]
    return ray.data.from_items(found, override_num_blocks=3)


def test_a_table_is_boosted_where_it_lies_to_the_librarys_own_model(rows: Any) -> None:
    check_model(un.on.ray(), rows)


def test_a_table_without_the_name_of_its_target_is_refused(rows: Any) -> None:
    from unisono.boost import XGBoost

    with pytest.raises(ValueError, match=r"give on= .* and as y the name of its column to learn"):
        XGBoost(workers=2, on=un.on.ray()).fit(rows)


# -- what is wrong -----------------------------------------------------------------------------------------------------


def test_an_address_where_nothing_listens_is_named(command: Command) -> None:
    ended = command(*unisono_run("--on", "ray", "--address", "127.0.0.1:9", "-n", "2", "script.py"), script="")
    assert ended.status == 1
    assert ended.err.startswith(
        "unisono run: Ray is not reachable at 127.0.0.1:9: a connection was tried for up to 3 s"
    )


def test_a_wrong_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="placement='NEAR'; expected one of PACK"):
        un.launch(fail_on_rank_1, workers=2, on=un.on.ray(placement="NEAR"))
    with pytest.raises(ValueError, match=r"address='10.0.0.1:1', but this program is connected to Ray at"):
        un.launch(fail_on_rank_1, workers=2, on=un.on.ray(address="10.0.0.1:1"))
    with pytest.raises(ValueError, match="cpus=-1"):
        un.launch(fail_on_rank_1, workers=2, on=un.on.ray(cpus=-1))
