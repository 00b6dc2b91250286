"""Who a process is under each engine, where workers meet without a launcher, and what the command line refuses."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import unisono as un
from unisono.cli import main
from unisono.launchers.engines.engine import Engine
from unisono.launchers.engines.mpi import Mpi
from unisono.launchers.engines.slurm import Slurm, job_script
from unisono.launchers.engines.ssh import Ssh, divide
from unisono.launchers.runtime.launch_env import read_place
from unisono.world.stores import agree_on_attempt, open_tcp_store

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "n[08-09]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.8",
}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, ("torchrun", 1, 2, 1, 2)),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, ("MPI", 3, 4, 1, 2)),
        (SLURM, ("Slurm", 2, 3, 0, 1)),
        ({**SLURM, "SLURM_GPUS_PER_TASK": "1", "SLURM_LOCALID": "1"}, ("Slurm", 2, 3, 0, 1)),
        ({**SLURM, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "9"}, ("Open MPI", 0, 9, 0, 0)),
        ({**SLURM, "RANK": "0", "WORLD_SIZE": "1"}, ("torchrun", 0, 1, 0, 0)),
    ],
)
def test_each_engines_variables_are_read(env: Mapping[str, str], expected: tuple[str, int, int, int, int]) -> None:
    place = read_place(env)
    assert place is not None
    assert (place.engine, place.rank, place.size, place.local_rank, place.local_size) == expected


def test_the_shell_of_an_allocation_is_not_a_worker() -> None:
    """sbatch sets SLURM_PROCID and SLURM_NTASKS for its script, which is one process all the same."""
    assert read_place({name: SLURM[name] for name in ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS")}) is None
    assert read_place({}) is None


def test_slurm_says_where_rank_0_is() -> None:
    place = read_place(SLURM)
    assert place is not None
    assert (place.first_host, place.launch_address, place.job) == ("n08", "10.0.0.8", "7.0.0")


@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2"},
        {"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_RANK": "-1", "PMI_SIZE": "2"},
    ],
)
def test_numbers_that_make_no_sense_are_refused(env: Mapping[str, str]) -> None:
    with pytest.raises(ValueError, match=r"expected 0 <=|must be a whole number"):
        read_place(env)


def test_an_attempt_meets_only_itself_in_a_store_that_others_used() -> None:
    """Three attempts one after the other in one store; the second loses a rank before it has met."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))

    def attempt(ranks: list[int]) -> list[str]:
        found: dict[int, str] = {}
        threads = [
            threading.Thread(target=lambda r=rank: found.update({r: agree_on_attempt(store, r, 3, timeout_s=20)}))
            for rank in ranks
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[rank] for rank in ranks]

    first = attempt([0, 1, 2])
    assert len(set(first)) == 1
    store.set("hello/1", "of a worker that died at once")
    second = attempt([2, 1, 0])
    assert len(set(second)) == 1
    assert second[0] != first[0]


def test_rank_0_does_not_wait_for_ever() -> None:
    store = dist.HashStore()
    store.set("hello/1", "of a worker that died")
    with pytest.raises(TimeoutError, match=r"ranks \[1\] did not come"):
        agree_on_attempt(store, 0, 2, timeout_s=0.1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--hosts", "a"], "--hosts does not go with --on local"),
        (["--on", "torchrun", "--hosts", "a"], "--hosts does not go with --on torchrun"),
        (["--on", "mpi", "--max-restarts", "2"], "--max-restarts does not go with --on mpi"),
        (["--on", "mpi", "--script", "x.sh"], "--script and --submit go with --on slurm"),
        (["--on", "nomad"], "invalid choice: 'nomad'"),
        (["--on", "torchrun", "--max-restarts", "-1"], "expected a whole number from 0 up"),
        (["--on", "torchrun", "--options=--standalone"], "no store of torchrun's is open to the network"),
        (["--on", "ssh"], "expected a list of hosts"),
    ],
)
def test_options_that_do_not_fit_are_refused(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["run", "-n", "2", *words, __file__])
    assert stop.value.code == 2
    assert told in capsys.readouterr().err


def test_something_else_than_an_engine_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got on='mpi'; expected an engine of un.on"):
        un.launch(pow, workers=2, args=(2, 3), on="mpi")  # type: ignore[arg-type]


def test_every_engine_is_a_frozen_dataclass_with_a_name() -> None:
    for name in un.on.__all__:
        engine = getattr(un.on, name)
        assert issubclass(engine, Engine)
        assert engine.name
        assert engine.__dataclass_params__.frozen
        assert engine.__doc__


def test_the_token_is_on_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.launchers.engines import engine as engines
    from unisono.launchers.engines import mpi, slurm

    commands: list[list[str]] = []
    for module in (mpi, slurm):
        monkeypatch.setattr(module, "find_program", lambda name, advice: f"/usr/bin/{name}")
        monkeypatch.setattr(module, "ProcessStarted", lambda command, env, **_: commands.append(command))
    monkeypatch.setattr(mpi, "_kind", lambda program: "Open MPI")
    work = engines.Work(2, ["python", "start.py"], {"UNISONO_AGENT": "secret"}, [("h", 1)], "secret")
    Mpi().start(work)
    Slurm().start(work)
    assert len(commands) == 2
    assert not any("secret" in word for command in commands for word in command)


def test_a_job_script_quotes_what_needs_it() -> None:
    text = job_script(
        Slurm(options=["--time=1:00"]), ["my train.py", "--name", "a b"], 2, run_options=["--threads", "4"]
    )
    assert "#SBATCH --time=1:00\n" in text
    assert "run --on slurm -n 2 --threads 4 'my train.py' --name 'a b'\n" in text


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_store_that_this_process_keeps_listens_only_at_the_address_given() -> None:
    store = open_tcp_store("127.0.0.1", 0, serve=True)
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    listening = {row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{store.port:04X}")}
    assert listening == {f"0100007F:{store.port:04X}"}
    again = open_tcp_store("127.0.0.1", store.port, serve=True)  # as a later init_process_group of the program would
    store.set("key", "value")
    assert again.get("key") == b"value"
    assert open_tcp_store("127.0.0.1", store.port, serve=False).get("key") == b"value"


def test_an_ipv6_address_is_a_host() -> None:
    assert divide(["fd00::7", "root@fd00::8"], 3) == {"fd00::7": 2, "root@fd00::8": 1}
    assert divide(["[fd00::7]:4", "root@[fd00::8]:2", "c:1"], 5) == {"fd00::7": 4, "root@fd00::8": 1, "c": 0}
    assert Ssh(["root@[fd00::7]:4", "fd00::8", "a:2"]).hosts_to_reach() == ["fd00::7", "fd00::8", "a"]
    assert Mpi(["[fd00::7]:4", "b"]).hosts_to_reach() == ["fd00::7", "b"]
    for wrong in ("a:4:5", "[fd00::7]x", "[]:4", "root@"):
        with pytest.raises(ValueError, match="expected different names"):
            divide([wrong], 2)
