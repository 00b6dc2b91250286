"""How many files a step passes through, from the start of backward() until the parameters have stepped: what a reader
opens who follows a gradient. Counted on every thread of one worker of two."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

PROGRAM = """
    import json, os, sys, threading, time
    import torch, unisono as un
    from torch import nn

    root = os.path.dirname(un.__file__) + os.sep
    entered, following, counting = {}, False, threading.local()

    def follow(frame, event, _):
        code = frame.f_code
        if not code.co_filename.startswith(root):
            return
        if code.co_name == "advance":  # it ends the ledger's step, when the gradients have long been there
            counting.step = event == "call"
        elif following and event == "call" and not getattr(counting, "step", False):
            entered.setdefault(code.co_filename.removeprefix(root), set()).add(code.co_name)

    def walk(spec):
        global following
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 10))  # a bucket above 1 MiB, small ones
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        replica = un.parallel(model, optimizer, spec)
        x = torch.randn(8, 600, generator=torch.Generator().manual_seed(world.rank))
        entered.clear()
        for step in range(6):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            following = step >= 3  # buffers are laid out by then
            loss.backward()
            optimizer.step()
            time.sleep(0.1)  # a step on another thread goes on behind optimizer.step()
            following = False
        replica.close()
        return {name: sorted(found) for name, found in sorted(entered.items())}

    threading.setprofile(follow)  # before there is a world: its threads are followed too
    sys.setprofile(follow)
    torch.set_num_threads(1)
    world = un.join(device="cpu")
    walks = {spec: walk(spec) for spec in sys.argv[1:]}
    sys.setprofile(None)
    threading.setprofile(None)
    if world.rank == 0:
        print(json.dumps(walks))
"""
NOTES = {  # they move nothing
    "launchers/runtime/debug_pause.py": {"_count_paused", "paused_s"},
    "world/ledger.py": {"close_record", "close_span"},
    "launchers/runtime/status.py": {"note", "beat"},
    "launchers/runtime/frames.py": {"find_site"},
    "launchers/runtime/watchdog.py": {"__init__", "enter", "leave", "look", "_watch"},
    "world/call_signatures.py": {"<genexpr>", "__init__", "agree", "check_places", "follow", "shapes_of"},
    # At stage 3: parameters are hidden and shown.
    "methods/strategies/zero/values.py": {
        "__torch_function__",
        "hide",
        "show",
        "gather_late",
        "refuse_written",
        "begin_step",
    },
    "methods/strategies/zero/program_state.py": {"check_lent"},  # what the program did to copies of counts
    "world/batch_weights.py": {"weight"},
    "methods/strategy/mistakes.py": {"is_looking"},  # zero has compared enough
    "methods/strategy/watches.py": {"<genexpr>", "_count_params", "refuse"},  # whether there are late parameters
    "predict/costs/network.py": {"all_reduce_bytes"},  # for the ledger
    "methods/strategy/program_writes.py": {"__init__"},  # where an exchange notes what the program writes meanwhile
    # A rank that waits for long, on a busy machine, looks whether the others live and are where it is.
    "world/transports/process_watch.py": {"has_died"},
    "world/transports/small_all_reduce.py": {"<genexpr>", "holds"},
    "methods/exchange/noise_scale.py": {"end_window", "is_due"},  # one window in 16 is looked at
}
LIMITS = {
    # sharing.py: buffers made the same
    "allreduce": 12,
    # More than allreduce: periodic.py, which methods of your own build on, _anchored.py, _fragments.py
    "local_sgd(every=1, start=0)": 15,
    # optimizer_shards.py: in the step the optimizer's groups hold the shards; buckets.py has the one flat layout
    # offloads.py: several optimizers may step off the device; native.py: the compiled step; small_all_reduce.py: small
    # sums
    "zero(stage=3, optimizer_on=cpu)": 25,
}


def test_a_step_passes_through_few_files(run_script: Callable[..., Any]) -> None:
    status, out, err = run_script(PROGRAM, "-n", "2", args=list(LIMITS)).finish(timeout_s=100)
    assert (status, err) == (0, "")
    walks: dict[str, dict[str, list[str]]] = json.loads(out[out.index("{") :])
    too_long = {}
    for spec, entered in walks.items():
        notes = [name for name, found in entered.items() if set(found) <= NOTES.get(name, set())]
        files = len(entered) - len(notes)
        print(f"{spec}: {files} files, and {len(notes)} that take notes")
        print("".join(f"  {name}: {', '.join(found)}\n" for name, found in entered.items()))
        if files > LIMITS[spec]:
            too_long[spec] = files
    assert not too_long
