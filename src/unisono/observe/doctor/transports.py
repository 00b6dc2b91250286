"""Which transports work here: each is tried by two real workers, with numbers that are checked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.observe.doctor.findings import Finding

if TYPE_CHECKING:
    from unisono.world.transports import Transport

__all__ = ["check_host_step", "check_transports", "judge_answers", "try_transports"]

SECTION = "transports and devices"
_NUMBERS = 1 << 20  # floats of a trial: 4 MiB
_TRIALS = 3
_PATIENCE_S = 60.0  # of the workers, with their start
_SOCKETS_S = 10.0
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")

Answer = dict[str, Any]


def check_transports(launch: Callable[..., list[Answer]] | None = None) -> list[Finding]:
    """Two workers of this host try each transport, and say what they found."""
    from unisono.launchers import WorkerError
    from unisono.launchers import launch as launch_workers

    try:
        answers = (launch_workers if launch is None else launch)(
            try_transports, 2, threads=1, output="rank0", timeout_s=_PATIENCE_S
        )
    except TimeoutError:
        text = f"two workers did not finish within {_PATIENCE_S:g} s"
        advice = "try `unisono run -n 2` with a program of yours; `unisono stacks` shows what its workers wait for"
        return [Finding(SECTION, "workers", "bad", text, advice)]
    except WorkerError as error:
        advice = "no run works until this is solved: `python -c 'import torch'` in the same environment may say more"
        return [Finding(SECTION, "workers", "bad", f"two workers could not be run: {error}", advice)]
    return judge_answers(answers)


def check_host_step(find: Callable[..., Any] | None = None) -> list[Finding]:
    """What steps Adam in the host's memory: code that is compiled here, or torch's kernel."""
    from unisono.methods.offload import native

    name = "Adam on the host"
    try:
        (native.find if find is None else find)(keep=False)
    except native.NotCompiled as error:
        return [Finding(SECTION, name, "ok", f"torch's kernel, with the optimizer off the device: {error}")]
    except Exception as error:
        text = f"torch's kernel, with the optimizer off the device, as compiled code does not work here: {error}"
        return [Finding(SECTION, name, "warn", text, "results are the same; steps may take longer")]
    return [Finding(SECTION, name, "ok", "compiled code, with the optimizer off the device: it gives torch's bits")]


# In a worker ----------------------------------------------------------------------------------------------------------


def try_transports() -> Answer:
    """Run by each of two workers: what each transport did, as plain values."""
    import torch

    from unisono.world import join

    torch.set_num_threads(1)
    world = join("cpu")
    assert world.transport is not None
    answer: Answer = {"torch": torch.__version__, "cuda_build": torch.version.cuda, "gpus": _list_gpus()}
    answer["reads_peers"] = world.transport.reads_peers
    answer["shared memory"] = _try(lambda: _measure(world.transport, "cpu"))
    answer["messages between hosts"] = _try(lambda: _measure(_connect_sockets(world.transport), "cpu"))
    answer["encrypted messages"] = _try(lambda: _measure(_connect_sockets(world.transport, is_encrypted=True), "cpu"))
    answer["backend"] = {"registered": "unisono" in torch.distributed.Backend.backend_list}
    gpus = [len(each) for each in world.gather_objects(answer["gpus"])]
    if min(gpus) > 0:
        answer["one GPU"] = _try(lambda: _try_sharing(world.transport))
        answer["NCCL"] = _try(lambda: _try_nccl(world.transport, alone=min(gpus) < world.size))
    return answer


def _list_gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    every = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": one.name, "memory_bytes": one.total_memory} for one in every]


def _try(trial: Callable[[], Answer]) -> Answer:
    """What the trial gives, or its error in words: that is what was asked for."""
    try:
        return trial()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _measure(transport: Transport | None, device: str) -> Answer:
    """All-reduce some numbers a few times and check the sums; the seconds of the fastest."""
    import torch

    assert transport is not None
    seconds = float("inf")
    for trial in range(_TRIALS):
        mine = torch.full((_NUMBERS,), float(transport.rank + 1 + trial), dtype=torch.float32, device=device)
        began = time.perf_counter()
        transport.all_reduce([mine], "sum")
        found = float(mine[0]), float(mine[-1])
        seconds = min(seconds, time.perf_counter() - began)
        wanted = float(sum(rank + 1 + trial for rank in range(transport.size)))
        if found != (wanted, wanted):
            raise ArithmeticError(f"the sum over the ranks is {found[0]:g} to {found[1]:g}, expected {wanted:g}")
    return {"seconds": seconds, "bytes": 4 * _NUMBERS}


def _open_store(transport: Transport) -> Any:
    from unisono.world.stores import open_torch_store

    return open_torch_store(
        lambda text: transport.exchange(text.encode())[0].decode(), transport.rank, towards="127.0.0.1"
    )


def _connect_sockets(transport: Transport | None, *, is_encrypted: bool = False) -> Transport:
    from torch.distributed import PrefixStore

    from unisono.world.transports.sockets import SocketTransport

    assert transport is not None
    store = PrefixStore("doctor", _open_store(transport))
    found = SocketTransport(store, transport.rank, transport.size, timeout_s=_SOCKETS_S)
    return found.connect_again(is_encrypted=True) if is_encrypted else found


def _try_sharing(transport: Transport | None) -> Answer:
    """All on the first device."""
    import torch

    from unisono.world.transports.cuda_memory import CudaMemory
    from unisono.world.transports.cuda_shared import CudaSharedTransport

    assert transport is not None
    device = torch.device("cuda", 0)
    with torch.cuda.device(device):
        shared = CudaSharedTransport.connect(transport, lambda: CudaMemory(device), timeout_s=20)
        return _measure(shared, "cuda")


def _try_nccl(transport: Transport | None, *, alone: bool) -> Answer:
    """Between the first two devices; `alone`: there is one, so each rank tries it by itself."""
    import torch
    from torch.distributed import HashStore, PrefixStore

    from unisono.world.transports.nccl import NcclTransport

    assert transport is not None
    rank, size = (0, 1) if alone else (transport.rank, transport.size)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store: Any = HashStore() if alone else _open_store(transport)
    return {**_measure(NcclTransport(PrefixStore("n", store), rank, size, device, timeout_s=20), "cuda"), "ranks": size}


# What it means --------------------------------------------------------------------------------------------------------


def judge_answers(answers: Sequence[Answer], yama: Path = _YAMA, devices: Path = Path("/dev/nvidia0")) -> list[Finding]:
    """What the workers' answers mean, a line for each transport."""
    found = [
        _judge(answers, "shared memory", "workers of one host exchange through it: without it no run works here"),
        _judge_reading(answers, yama),
        _judge(
            answers,
            "messages between hosts",
            "hosts exchange over it: check that no firewall blocks ports above 1024, and that GLOO_SOCKET_IFNAME names "
            "an interface of this host; runs on one host do not need it",
            fatal=False,
        ),
        _judge(
            answers,
            "encrypted messages",
            "between hosts on different networks, or at public addresses, everything is encrypted: if that fails, "
            "connect them by a VPN and pass --no-encrypt",
            fatal=False,
        ),
        _judge_backend(answers),
        _judge_devices(answers[0], devices),
    ]
    if answers[0]["gpus"]:
        advice = "workers that share a GPU exchange through host memory: run them in one container, or with --ipc=host "
        advice += "and --pid=host; WSL and MIG slices do not allow it"
        found.append(_judge(answers, "one GPU", advice, fatal=False))
        found.append(_judge(answers, "NCCL", "GPUs exchange over it: set NCCL_DEBUG=INFO for details"))
    return found


def _judge(answers: Sequence[Answer], name: str, advice: str, *, fatal: bool = True) -> Finding:
    tried = [answer.get(name, {"error": "not tried"}) for answer in answers]
    errors = [f"rank {rank}: {one['error']}" for rank, one in enumerate(tried) if "error" in one]
    if errors:
        return Finding(SECTION, name, "bad" if fatal else "warn", "; ".join(dict.fromkeys(errors)), advice)
    seconds, nbytes = max(one["seconds"] for one in tried), tried[0]["bytes"]
    ranks = tried[0].get("ranks", len(answers))
    who = f"{ranks} ranks" if ranks > 1 else "1 rank, as there is one GPU"
    text = f"works: {nbytes >> 20} MiB summed over {who} in {1e3 * seconds:.1f} ms"
    return Finding(SECTION, name, "ok", text, values={"seconds": seconds, "bytes": nbytes, "ranks": ranks})


def _judge_reading(answers: Sequence[Answer], yama: Path) -> Finding:
    name = "process_vm_readv"
    if all(answer["reads_peers"] for answer in answers):
        return Finding(SECTION, name, "ok", "permitted: workers read each other's gradients where they are")
    if os.environ.get("UNISONO_PEER_MEMORY") == "0":
        return Finding(SECTION, name, "ok", "turned off (UNISONO_PEER_MEMORY=0): tensors pass through shared memory")
    scope = yama.read_text(encoding="ascii").strip() if yama.is_file() else ""
    why = f" (Yama: ptrace_scope {scope})" if scope not in ("", "0", "1") else ""
    advice = "in a container: --cap-add=SYS_PTRACE, or a seccomp profile that allows it" + (
        "; as root: sysctl kernel.yama.ptrace_scope=1" if why else ""
    )
    text = f"not permitted{why}: tensors are copied through shared memory, which is slightly slower"
    return Finding(SECTION, name, "warn", text, advice)


def _judge_backend(answers: Sequence[Answer]) -> Finding:
    name = "torch backend"
    if all(answer["backend"].get("registered") for answer in answers):
        return Finding(SECTION, name, "ok", 'torch knows init_process_group("unisono")')
    text = answers[0]["backend"].get("error", "torch does not know the backend `unisono`")
    return Finding(
        SECTION, name, "warn", text, "pip install unisono into this environment: torch finds it by its metadata"
    )


def _judge_devices(answer: Mapping[str, Any], device_file: Path) -> Finding:
    gpus, build = answer["gpus"], answer["cuda_build"]
    values = {"gpus": gpus, "cuda_build": build, "torch": answer["torch"]}
    if gpus:
        each = ", ".join(f"{gpu['name']} ({gpu['memory_bytes'] / (1 << 30):.0f} GiB)" for gpu in gpus)
        return Finding(
            SECTION, "devices", "ok", f"{len(gpus)} GPU{'s' * (len(gpus) > 1)}: {each}; CUDA {build}", "", values
        )
    if device_file.exists():
        text = "this host has a GPU, but torch sees none"
        if build is None:
            advice = "this torch is a build for CPUs: pip install torch from the index of a CUDA build (pytorch.org)"
        else:
            advice = f"built for CUDA {build}: check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        return Finding(SECTION, "devices", "warn", text, advice, values)
    return Finding(SECTION, "devices", "ok", "no GPU here: workers train on the CPU", "", values)
