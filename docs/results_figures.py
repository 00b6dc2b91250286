"""What docs/results.md shows: the figures of each benchmark, in words, and from where on a figure is lost."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Figure:
    """Keys of a benchmark's line, by a pattern; its groups go into the words.

    bound: from where on it is lost: 1 of a ratio, or a target. None: it is only shown.
    more: whether more is better.
    against, other: the key that it is compared with where there is no bound, and what that is called.
    slack: how far from the bound still counts as reached; within: the same as a share of it.
    condition: a pattern: only of runs in such a condition.
    why: the cause, where it is lost. all_words, label: what it, and each key of it, is called in the
        list of what is lost.
    """

    keys: str
    words: str
    unit: str = "x"
    bound: float | None = None
    more: bool = True
    against: str = ""
    other: str = ""
    slack: float = 0.0
    within: float = 0.0
    condition: str = ""
    is_target: bool = False
    why: str = ""
    all_words: str = ""
    label: str = ""


@dataclass(frozen=True)
class Matrix:
    """Figures whose first group is a method: a row each. Only of runs in the condition, where one is given."""

    words: str
    figures: tuple[Figure, ...]
    condition: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page: the benchmarks whose lines it shows, and what of them."""

    title: str
    words: str
    names: tuple[str, ...]
    figures: tuple[Figure, ...] = ()
    matrices: tuple[Matrix, ...] = field(default=())


def faster(keys: str, words: str, goal: float = 1.0, *, why: str = "", all_words: str = "", label: str = "") -> Figure:
    """The other's time over ours: below 1, or below a goal, it is lost."""
    return Figure(keys, words, "x", goal, is_target=goal != 1.0, why=why, all_words=all_words, label=label)


def shown(keys: str, words: str, unit: str) -> Figure:
    return Figure(keys, words, unit)


def target(keys: str, words: str, unit: str, bound: float, *, more: bool = False, why: str = "") -> Figure:
    return Figure(keys, words, unit, bound, more=more, is_target=True, why=why)


def adds(keys: str, words: str, condition: str, most_ms: float, why: str, against: str = "") -> Figure:
    """Milliseconds that a method adds to a step on a GPU, with what is added by PyTorch's hook where there is one."""
    return Figure(keys, words, "ms", most_ms, more=False, against=against, other="PyTorch's hook", condition=condition,
                  is_target=True, all_words="what a method adds to a step", label=words, why=why)  # fmt: skip


# How the benchmarks' names of methods read here: a setting after the name is its first argument.
METHOD_NAMES = {
    r"(powersgd)_r(\d)": r"\1(\2)",
    r"(topk|randomk)_1(pct)?(?![0-9a-z])": r"\1(0.01)",
    r"(topk|randomk)_10\b": r"\1(0.1)",
    r"topk_01\b": "topk(0.001)",
    r"(n?u?qsgd)_(\d)\b": r"\1(\2)",
    r"^ef_": "error_feedback, ",
    r"^(warmup|accordion|hierarchical|masked|dgc|error_feedback)_": r"\1, ",
    r"(?:parameter_)?server_(\d+|async)": r"parameter_server(\1)",
    r"_after_backward": ", after backward",
    r"^local_sgd_(\d)_": r"local_sgd(\1), ",
    r"^torch_": "PyTorch's ",
}

COMPRESSION = "in shared memory bytes cost little, and compressing costs the same as ever: use `dense` on one host"
MEMORY = "all gradients pass through the memory that both cores share; [`shared`](methods/shared.md) moves less of them"
GPT = "its kernels read and write the gradients and what was kept five times"
HOOKS = "in a world of one our hooks on the parameters are all that is added: Python's time, in a short step"
POWERSGD = r"(powersgd)_r(\d)_adds_ms"
HOST_BOUND = "the host is the bottleneck"  # see find_condition in results.py
HOST = (f".*{HOST_BOUND}", 2.0, "launching its kernels is the host's work, and the GPU waits for the host anyway")
GPU = (f"(?!.*{HOST_BOUND}).*", 1.0, "by little, or in one run of several: see the range")
FAST_LINK = "the link is so fast that compressing takes longer than sending"

SECTIONS = (
    Section(
        "Collectives",
        "`benchmarks/transport.py`: gloo's time over ours, workers of one host; and between emulated hosts the share "
        "of what the links could carry.",
        ("transport",),
        (
            faster(r"gloo_over_ours_allreduce_(\d)", "all-reduce in our memory, {} workers"),
            faster(r"gloo_over_ours_allreduce_private_(\d)", "all-reduce in private memory, {} workers"),
            faster(r"gloo_over_ours_(reduce_scatter|all_gather|broadcast)_(\d)", "{}, {} workers"),
            faster(r"gloo_over_ours_small_(\d)", "a small all-reduce, {} workers"),
            target(r"ours_us_small_(\d)", "a small all-reduce, {} workers, in time", "us", 40),
            shown(r"ours_ms_allreduce_(\d)", "all-reduce of 100 MB in our memory, {} workers, in time", "ms"),
            faster(r"gloo_over_ours_small_asleep_(\d)", "the same, ranks that sleep at once, {} workers"),
            faster(r"gloo_over_sockets_(\d)", "all-reduce of 100 MB over our sockets, {} ranks", 2.0),
            faster(r"gloo_over_sockets_small_(\d)", "a small all-reduce over our sockets, {} ranks"),
            faster(r"gloo_over_sockets_(reduce_scatter|all_gather|broadcast|all_to_all)_(\d)",
                   "{} over our sockets, {} ranks", 2.0),
            faster(r"gloo_over_sockets_encrypted_(\d)", "an encrypted all-reduce over plain gloo's, {} ranks", 0.8),
            Figure(r"hosts_(broadcast|reduce_scatter)_of_bound", "{} between 4 hosts, 1 Gbit/s", "%",
                   against=r"hosts_\1_of_bound_gloo", other="gloo"),
        ),
    ),
    Section(
        "A step of a small model between hosts",
        "`benchmarks/small_steps.py`: the step of DistributedDataParallel over gloo over ours, by the size of the "
        "gradients; 4 ranks that reach each other by messages only.",
        ("small_steps",),
        (faster(r"ddp_over_ours_(0\.2mb|2mb|27mb)", "gradients of {}", 1.1),),
    ),
    Section(
        "A training step",
        "`benchmarks/step.py`: the step of DistributedDataParallel (over gloo; NCCL on the GPU) over ours, and ours "
        "over the bare loop without any exchange.",
        ("step",),
        (
            faster(r"ddp_over_ours_(\d)", "MLP of 25 M parameters, {} workers"),
            faster(r"ddp_over_ours_cnn_(\d)", "CNN that mostly computes, {} workers"),
            faster(r"ddp_over_ours_gpu", "MLP, a world of one on the GPU"),
            faster(r"ddp_over_ours_gpu_cnn", "CNN, a world of one on the GPU"),
            faster(r"ddp_over_shared_(adamw)_(2)", "strategy shared, {}, {} workers", 1.4),
            faster(r"ddp_over_shared_(adamw)_(4)", "strategy shared, {}, {} workers", 1.8),
            faster(r"ddp_over_shared_(adamw)_(8)", "strategy shared, {}, {} workers", 2.1),
            faster(r"ddp_over_shared_(sgd)_(\d)", "strategy shared, {}, {} workers"),
            faster(r"hierarchical_over_shared", "hierarchical over shared, 4 emulated hosts of 2 workers"),
            target(r"ours_over_bare_(2)", "over the bare loop: MLP, {} workers", "x", 1.3, why=MEMORY),
            shown(r"ours_over_bare_([^2\D])", "over the bare loop: MLP, {} workers", "x"),
            shown(r"ours_over_bare_cnn_(\d)", "over the bare loop: CNN, {} workers", "x"),
            target(r"ours_over_bare_gpu", "over the bare loop on the GPU: MLP", "x", 1.01, why=HOOKS),
            target(r"ours_over_bare_gpu_cnn", "over the bare loop on the GPU: CNN", "x", 1.01, why=HOOKS),
            target(r"(allreduce|zero2|zero3)_over_bare_gpt", "over the bare loop: GPT-2 on the GPU, {}", "x", 1.02),
            target(r"(powersgd)_over_bare_gpt", "over the bare loop: GPT-2 on the GPU, {}", "x", 1.03, why=GPT),
            shown(r"(ddp|fsdp2)_over_bare_gpt", "over the bare loop: GPT-2 on the GPU, {}", "x"),
            target(r"shared_over_bare_(adamw)_(4)", "over the bare loop: shared, {}, {} workers", "x", 1.0),
            shown(r"shared_over_bare_(adamw)_([^4\D])", "over the bare loop: shared, {}, {} workers", "x"),
            shown(r"shared_over_bare_(sgd)_(\d)", "over the bare loop: shared, {}, {} workers", "x"),
            shown(r"world_of_one_overhead", "a world of one: what the loop costs more", "%"),
            shown(r"ledger_overhead", "what the ledger costs", "%"),
        ),
    ),
    Section(
        "PyTorch's own programs over our backend",
        "`benchmarks/backend.py`: the step over gloo, over the step over [`unisono`](backend.md), workers of one host.",
        ("backend",),
        (
            faster(r"ddp_gloo_over_unisono_(\d)", "DistributedDataParallel, {} workers", 1.2,
                   why="measured once on that machine; why it gains less there is not known"),
            faster(r"fsdp2_gloo_over_unisono_(\d)", "FSDP2, {} workers", 1.4),
            faster(r"tensor_gloo_over_unisono_(\d)", "tensor parallel, {} workers", 1.1,
                   why="its messages are small: there both cost about the same, most of it Python"),
            faster(r"pipeline_gloo_over_unisono_(\d)", "pipeline (1F1B), {} stages",
                   why="it is bound by compute: there is little to gain"),
            faster(r"allreduce_gloo_over_unisono_(\d)", "one all-reduce of 25 MB, {} workers"),
            shown(r"ours_allreduce_over_ddp_on_unisono_(\d)", "DDP on it, over our own allreduce, {} workers", "x"),
        ),
    ),
    Section(
        "ZeRO",
        "`benchmarks/zero.py`: the step of FSDP2 and of DDP (AdamW, over gloo), over that of [zero](methods/zero.md); "
        "the peak of memory over what `un.memory` predicts.",
        ("zero",),
        (
            faster(r"fsdp2_over_ours_([12])_(2)", "FSDP2, MLP, stage {}, {} workers", 1.4),
            faster(r"fsdp2_over_ours_(3)_(2)", "FSDP2, MLP, stage {}, {} workers"),
            faster(r"fsdp2_over_ours_(\d)_([^2\D])", "FSDP2, MLP, stage {}, {} workers"),
            faster(r"fsdp2_over_ours_(\d)_text_(\d)", "FSDP2, transformer, stage {}, {} workers"),
            faster(r"ddp_over_ours_(1)_(2)", "DDP, MLP, stage {}, {} workers", 1.4),
            faster(r"ddp_over_ours_([23])_(2)", "DDP, MLP, stage {}, {} workers"),
            faster(r"ddp_over_ours_(\d)_([^2\D])", "DDP, MLP, stage {}, {} workers"),
            faster(r"ddp_over_ours_(\d)_text_(\d)", "DDP, transformer, stage {}, {} workers",
                   why="DDP splits nothing: it keeps everything on every worker",
                   all_words="DDP over zero, transformer", label="stage {}, {} workers"),
            shown(r"peak_over_formula_(\d)_(\d)", "peak of memory over the prediction, stage {}, {} workers", "x"),
        ),
    ),
    Section(
        "Offload on a GPU",
        "`benchmarks/gpu_offload.py`: a GPT of 1.41 billion parameters whose optimizer state is in host memory, "
        "against FSDP2's `CPUOffloadPolicy`.",
        ("gpu_offload",),
        (
            faster(r"offload_over_fsdp2_(\d+)", "{} tokens a step"),
            faster(r"delayed_over_fsdp2_(4096)", "{} tokens a step, update delayed by one step", 1.9,
                   why="bound by the bandwidth of the host's memory, which others of that machine use: see the range"),
            faster(r"delayed_over_fsdp2_(?!4096)(\d+)", "{} tokens a step, update delayed by one step"),
            faster(r"ahead_over_fsdp2_(\d+)", "{} tokens a step, stepped ahead"),
            faster(r"deferred_over_fsdp2_(\d+)", "{} tokens a step, deferred steps", 4.0),
            faster(r"(?:offload|deferred)_over_deepspeed_(\d+)", "over DeepSpeed's ZeRO-Offload, {} tokens a step"),
            shown(r"loss_(deferred|delayed|bf16_moments)_over_exact", "held-out loss over that of exact steps: {}", ""),
            shown(r"gpu_busy_share_(\d+)", "share of the time in which the GPU works, {} tokens", "%"),
            shown(r"gpu_busy_share_delayed_(\d+)", "the same, update delayed, {} tokens", "%"),
            shown(r"budget_(\d+)gib_tokens_s", "tokens per second in {} GiB of device memory", ""),
            shown(r"budget_(\d+)gib_peak_gib", "the most it used of {} GiB", "GiB"),
            shown(r"largest_parameters", "largest model of width 4096 that trains, parameters", ""),
            shown(r"largest_s", "its step", "s"),
            shown(r"disk_parameters", "with state on disk: parameters", ""),
            shown(r"disk_s", "its step", "s"),
        ),
    ),
    Section(
        "The optimizer's step on the host",
        "`benchmarks/host_step.py`: AdamW on 8 M parameters with fp32 state, gradients and new values in bf16; the "
        "time of torch's fused kernel over that of our compiled step, which gives the same bits.",
        ("host_step",),
        (
            faster(r"tiles_over_compiled_(\d)", "in tiles, threads: {}"),
            faster(r"tiles_over_compiled_copy_(\d)", "in tiles, into a second copy of the state, threads: {}"),
            faster(r"whole_over_compiled_(\d)", "over the whole at once, threads: {}"),
            shown(r"compiled_mparam_s_(\d)", "million parameters per second, threads: {}", ""),
        ),
    ),
    Section(
        "State on disk",
        "`benchmarks/disk.py`: bytes per second of an optimizer step whose state is on disk, over those of plain "
        "reading and writing.",
        ("disk",),
        (
            target(r"disk_share", "of the disk's bandwidth", "%", 0.8, more=True),
            target(r"disk_share_16bit", "with 16-bit moments", "%", 0.8, more=True),
            shown(r"step_mparam_s", "million parameters per second", ""),
            shown(r"memory_mparam_s", "the same, all in memory", ""),
        ),
    ),
    Section(
        "Reducers on one host",
        "`benchmarks/reducers.py`: 2 workers, one thread each, the gradients of an MLP of 25 M parameters. Only the "
        "reduction is timed.",
        ("reducers",),
        (),
        (
            Matrix(
                "Bytes over those of exact gradients; gloo's exact all-reduce, and PyTorch's hook, over ours",
                (
                    shown(r"bytes_over_dense_(\w+)", "bytes", ""),
                    faster(r"gloo_dense_over_ours_(\w+)", "gloo, exact", why=COMPRESSION,
                           all_words="gloo's exact all-reduce over our reduction, on one host"),
                    faster(r"torch_hook_over_ours_(\w+)", "PyTorch's hook"),
                    faster(r"step_torch_hook_over_ours_(\w+)", "the same, a whole step"),
                ),
            ),
        ),
    ),
    Section(
        "Reducers on a GPU",
        "`benchmarks/gpu_reducers.py`: what a method adds to the step of a transformer of 85 M parameters in a world "
        "of one, in milliseconds. Nothing is sent: it is the work of compressing.",
        ("gpu_reducers",),
        (
            *(adds(POWERSGD, "{} rank {}", *where, against=r"torch_hook_r\2_adds_ms") for where in (HOST, GPU)),
            *(adds(r"(bf16|topk|nuqsgd|bytegrad|signsgd|onebit)_adds_ms", "{}", *where) for where in (HOST, GPU)),
            adds(r"(fp16|randomk|error_feedback_nuqsgd|masked_powersgd|accordion_powersgd)_adds_ms", "{}", ".*", 2.0,
                 "tensors and what is kept of them are copied together and back"),
            shown(r"(ddp)_adds_ms", "plain {}", "ms"),
            Figure(r"topk_1pct_124m_ms", "1 % of 124 M values selected and packed", "ms", more=False,
                   against="torch_topk_ms", other="torch.topk"),
            shown(r"nuqsgd_encode_share_of_copy", "bytes per second of nuqsgd's encoder over those of a copy", "%"),
        ),
    ),
    Section(
        "Ranks that share a GPU",
        "`benchmarks/gpu_ipc.py`: an all-reduce between processes on one GPU, which map each other's tensors; the time "
        "through host memory and gloo's over ours. A copy counts the bytes that it reads and writes; an all-reduce "
        "reads and writes each rank's tensor once.",
        ("gpu_ipc",),
        (
            faster(r"host_over_ipc_100mb_(\d)", "through host memory, 100 MB, {} ranks", 20),
            faster(r"host_over_ipc_(1mb|4b)_(\d)", "through host memory, {}, {} ranks"),
            faster(r"gloo_over_ipc_(100mb|1mb|4b)_(\d)", "gloo, {}, {} ranks"),
            target(r"share_of_copy_(\d)", "share of a copy's bandwidth, 100 MB, {} ranks", "%", 0.5, more=True,
                   why="the kernel takes 124 of these 523 us; the rest is the host's, probably ranks that sleep and "
                   "are woken up: since then they look longer before they sleep, which has not been measured"),
            shown(r"share_of_copy_after_work_(\d)", "the same after kernels of every rank, {} ranks", "%"),
            Figure(r"step_ms_ipc_(\d)", "a step of an MLP of 25 M parameters, {} ranks", "ms", more=False,
                   against=r"step_ms_ddp_gloo_\1", other="DDP over gloo"),
            shown(r"step_ms_(host|bare)_(\d)", "the same, {}, {} ranks", "ms"),
        ),
    ),
    Section(
        "Tests on a GPU",
        "`make gpu`: the tests that need a CUDA device, in one line when all of their files have been run.",
        ("tests",),
        (shown(r"passed", "tests passed", ""), target(r"failed", "tests failed", "", 0)),
    ),
    Section(
        "Several learners of one worker",
        "`benchmarks/learners.py --cpu`: learners of `crossbow` batched by torch.func, over learners in threads, in "
        "samples per second of processor time.",
        ("learners",),
        (
            shown(r"batched_over_threads_mlp_([2-9])", "MLP of three layers, {} learners", "x"),
            shown(r"batched_over_threads_cnn_([2-9])", "CNN on 8 x 8, {} learners", "x"),
            shown(r"batched_over_threads_text_([2-9])", "transformer of width 64, {} learners", "x"),
        ),
    ),
    Section(
        "Several learners on one GPU",
        "`benchmarks/learners.py --gpu`: learners of `crossbow` in one CUDA graph, a ResNet of 17 convolutions on 32 x "
        "32 images, batches of 16 a learner; seconds to 90 % on Fashion-MNIST with 128 samples a step.",
        ("learners",),
        (
            shown(r"bare_samples_s", "the eager loop", "samples/s"),
            shown(r"graph1_samples_s", "one learner's step as a graph of its own", "samples/s"),
            shown(r"learners_(\d+)_samples_s", "ours, learners: {}", "samples/s"),
            faster(r"learners_over_bare_8", "8 learners over the eager loop", 20.0,
                   why="the GPU is full, 16 are no faster; the loop is as fast as the host launches kernels"),
            faster(r"learners_over_own_graph_8", "8 learners over one learner's own graph", 3.0),
            shown(r"seconds_to_90_bare", "to 90 %: the eager loop", "s"),
            shown(r"seconds_to_90_crossbow", "to 90 %: ours, 8 learners", "s"),
        ),
    ),
    Section(
        "Slow networks",
        "`benchmarks/network.py`: emulated hosts with one worker each, an MLP of 25 M parameters.",
        ("network",),
        (
            Figure(r"ring_fraction_(?!encrypted)(\w+)", "our all-reduce, share of what a link of {} could carry", "%",
                   against=r"gloo_fraction_\1", other="gloo", why="by less than runs differ",
                   all_words="our all-reduce between hosts, share of what the link could carry"),
            target(r"ring_fraction_encrypted_(\w+)", "the same, encrypted, {}", "%", 0.93, more=True),
            faster(r"gloo_over_ring", "all-reduce of 100 MB, no link held back", 2.0),
            faster(r"gloo_over_ring_encrypted", "the same, encrypted, over plain gloo's", 0.8),
            faster(r"ddp_over_(dense)_unshaped", "the step of DDP over ours ({}), no link held back", 1.2),
            shown(r"ddp_seconds", "to the loss that DDP reaches in 80 steps, 100 Mbit/s: DDP", "s"),
            shown(r"(torch_powersgd_r\d)_seconds", "to the same loss: {}", "s"),
            shown(r"((?:local_sgd_\d_)?powersgd_r\d)_seconds", "to the same loss: ours, {}", "s"),
            shown(r"(local_sgd_\d_topk|sparseloco_\d)_seconds", "to the same loss: ours, {}", "s"),
            faster(r"best_over_ddp_(\w+)", "the best of ours, against DDP, {}", 20.0),
            faster(r"best_over_torch_powersgd_(\w+)", "the best of ours, against PyTorch's PowerSGD hook, {}", 3.0),
        ),
        (
            Matrix(
                "The step of DDP over ours, by method and link",
                (faster(r"ddp_over_(?!dense_after)(\w+)_(100|1000|10000)", "{1} Mbit/s",
                        all_words="DDP over ours, emulated hosts", label="{}, {} Mbit/s",
                        why="the same bytes, by about the same ring: runs differ by as much"),),
                "4 hosts",
            ),
            Matrix(
                "Our step with exact gradients over that with a method",
                (faster(r"dense_over_(?!ddp|dense)(\w+)_(100|1000|10000)", "{1} Mbit/s", why=FAST_LINK,
                        all_words="our exact gradients over a method, emulated hosts", label="{}, {} Mbit/s"),),
                "2 hosts",
            ),
        ),
    ),
    Section(
        "A slow worker",
        "`benchmarks/strategies.py`: 4 workers on one host, one of them 3 times as slow. `benchmarks/stragglers.py`: "
        "one worker 4 times as slow, and how much of the time [balancing](stragglers.md) wins back.",
        ("strategies", "stragglers"),
        (
            Figure(r"recovered_share", "won back by balancing, 2 workers", "%", against="possible_share",
                   other="possible", why="samples can be given to others, the fixed part of a step cannot"),
            Figure(r"recovered_share_4", "won back by balancing, 4 workers", "%", against="possible_share_4",
                   other="possible", why="samples can be given to others, the fixed part of a step cannot"),
        ),
        (
            Matrix(
                "Samples per second over those of allreduce, with the slow worker; what the others keep of their speed",
                (
                    faster(r"over_allreduce_(\w+)", "over allreduce", all_words="samples per second over allreduce's",
                           why="they wait for the slow worker as allreduce does, and send or compute more"),
                    shown(r"kept_(\w+)", "speed kept", "%"),
                ),
            ),
        ),
    ),
    Section(
        "Plans",
        "`benchmarks/planner.py`: predicted steps against measured ones, 4 emulated hosts, several links and models.",
        ("planner",),
        (
            target(r"worst_regret_to_a_loss", "the first choice's time to a loss over the best, less one", "%", 0.10),
            target(r"worst_regret", "the first choice's step over the fastest, less one", "%", 0.10),
            target(r"worst_prediction_error", "a step's prediction, worst error", "%", 0.15,
                   why="the worst of all methods, links and models; the median is in its table below"),
            shown(r"median_prediction_error", "a step's prediction, median error", "%"),
            target(r"worst_simulation_error", "a simulated step, worst error", "%", 0.15),
            target(r"plan_s", "`unisono plan` in all", "s", 30),
        ),
    ),
    Section(
        "Workers that are lost",
        "`benchmarks/faults.py`: workers killed at every moment of a step, beside an undisturbed run in float64.",
        ("faults",),
        (
            shown(r"kills", "kills", ""),
            Figure(r"recovered", "of them recovered", "", against="kills", other="of"),
            target(r"samples_lost", "samples lost", "", 0),
            target(r"samples_repeated", "samples repeated", "", 0),
            shown(r"difference", "largest difference of a weight", ""),
            shown(r"median_recovery_s", "from a worker's end to the next step, median", "s"),
            shown(r"worst_recovery_s", "the same, at worst", "s"),
            Figure(r"hostile_refused", "messages of strangers refused", "", against="hostile_sent", other="of"),
            shown(r"soak_kills", "in a quarter of an hour: kills", ""),
            shown(r"launcher_mb", "memory that the launcher gained meanwhile", "MB"),
            shown(r"worker_mb", "memory that a worker that stayed gained", "MB"),
        ),
    ),
    Section(
        "Starts and engines",
        "`benchmarks/startup.py`, `benchmarks/engines.py`: until the first collective, and a step on an engine over "
        "one on this host.",
        ("startup", "engines"),
        (
            faster(r"torchrun_over_ours", "torchrun's start over ours, 2 workers"),
            shown(r"import_unisono_s", "`import unisono` on top of `import torch`", "s"),
            shown(r"cold_run_s", "`unisono run` until both workers are in the script", "s"),
            shown(r"warm_run_s", "`unisono run --warm`", "s"),
            shown(r"launch_again_s", "a second `un.launch` in a program", "s"),
            shown(r"first_step_s_(\w+)", "to the end of the first step: {}", "s"),
            Figure(r"per_step_overhead_(\w+)", "a step over a local one: {}", "x", 1.0, more=False, slack=0.05),
        ),
    ),
    Section(
        "Watching a run",
        "`benchmarks/overhead.py`, `benchmarks/page.py`, `benchmarks/soak.py`: what watching costs.",
        ("overhead", "page", "soak"),
        (
            target(r"overhead", "everything that watches, on a step of 20 ms", "%", 0.01),
            target(r"page_lag_s", "how late the live page is, 64 ranks at 50 steps per second", "s", 1),
            shown(r"page_busy", "what its server takes of a core", "%"),
            shown(r"kb_per_1000_(.+)", "memory a worker gains in 1,000 steps, {}", "kB"),
        ),
    ),
    Section(
        "Pipelines",
        "`benchmarks/hybrid.py`: how long stages stand still, beside the formula (p - 1) / (m + p - 1).",
        ("hybrid",),
        (
            Figure(r"bubble_(gpipe|1f1b)_(\d)", "{}, {} stages, 8 microbatches", "%", more=False,
                   against=r"bubble_formula_\2", other="formula",
                   all_words="stages of a pipeline stand still", label="{}, {} stages", within=0.1,
                   why="two stages share memory and the rest of the system; stages that sleep come nearer"),
            Figure(r"bubble_(1f1b)_slept_(\d)", "{}, {} stages that sleep", "%", more=False,
                   against=r"bubble_formula_\2", other="formula", within=0.1,
                   why="messages, and stages that do not take equally long"),
        ),
    ),
    Section(
        "Muon under sharding",
        "`benchmarks/zero.py --optimizer muon`: the hidden matrices of a transformer of 25 M parameters under "
        "`zero(stage=2)`. nanochat's own distributed Muon computes its polynomial in float32 on CPUs, torch's in "
        "bfloat16: both are shown. On a GPU: a GPT of 124 M parameters, compiled, a world of one.",
        ("zero",),
        (
            faster(r"peer_over_ours_(\d)", "the step of nanochat's Muon over ours, {} workers", 1.5),
            faster(r"peer_bf16_over_ours_(\d)", "the same, both in bfloat16, {} workers"),
            target(r"muon_step_scaling_(\d)", "the optimizer's part of a step times {0}, over one worker's, {0} ranks",
                   "x", 1.15, why="by less than runs differ"),
            target(r"zero_over_plain", "Muon under zero over plain Muon", "x", 1.02),
            target(r"offload_wrong_elements", "elements stepped on the host, other than plain Muon's there", "", 0),
        ),
    ),
    Section(
        "Hybrid sharding",
        "`benchmarks/sharding.py`: `zero(stage=3, within=host)` against FSDP2's HSDP over gloo, a transformer of 25 M "
        "parameters, 4 emulated hosts of 2 workers, links of 1 Gbit/s; and gathers in 8 bits. Eight workers share the "
        "machine's cores, so that a step is mostly computing there.",
        ("sharding",),
        (
            faster(r"hsdp_over_ours", "the step of HSDP over ours", 2.0,
                   why="eight workers compute on two cores, and computing is the same on both sides"),
            faster(r"hsdp_over_ours_powersgd", "the same with across=powersgd(rank=4)", 5.0,
                   why="eight workers compute on two cores, and computing is the same on both sides"),
            target(r"across_over_formula", "bytes between hosts over the formula's", "x", 1.0),
            target(r"gather_int8_bytes", "bytes of gathers in 8 bits over those in fp32", "x", 0.27),
            target(r"loss_int8_over_exact", "loss on held-out text with gathers in 8 bits, over exact ones", "x", 1.01),
        ),
    ),
    Section(
        "Checkpoints",
        "`benchmarks/checkpoints.py`: a save in the background beside a blocking one and beside "
        "torch.distributed.checkpoint's async_save. With a GPU: 0.94 B parameters with AdamW, 11.3 GB.",
        ("checkpoints",),
        (
            target(r"stall_share", "the call of a background save over that of a blocking one", "%", 0.05),
            faster(r"dcp_stall_over_ours", "the call of async_save over ours", 2.0),
            target(r"steps_meanwhile", "a step while it is written, over a normal one", "x", 1.1,
                   why="two workers and the thread that writes share two cores"),
            shown(r"stall_s", "the call", "s"),
        ),
    ),
    Section(
        "Streams",
        "`benchmarks/streams.py`: 192 MB in each format, divided over the workers; bytes are counted by the kernel.",
        ("streams",),
        (
            target(r"bytes_(\w+)_(\d)", "bytes read in an epoch over the data's, {}, by {}", "x", 1.05),
            target(r"again_(\w+)", "read again by a run that resumes at half, {}", "%", 0.02,
                   why="up to a row group for each of 48 lanes (3.3 %); the rest is not explained"),
            faster(r"webdataset_rate", "samples per second of a WebDataset over plain WebDataset's, 2 workers", 1.0),
            shown(r"exactly_once", "of 50 random elastic schedules, those in which each sample counted once", ""),
        ),
    ),
    Section(
        "Beside other systems",
        "`benchmarks/peers/`: each in an environment of its own, both sides in one run. torchft 0.2.0, DeepSpeed "
        "0.19.8, Accelerate 1.15.0 and Lightning 2.6.6 over gloo, 2 ranks, an MLP of 25 M parameters with AdamW. "
        "Recovery is from the kill of one of three to the next step of both others; torchft waits for the lost one as "
        "long as its lighthouse is told: with the settings of its README, and with a `join_timeout_ms` of 200. Local "
        "SGD and DiLoCo: a character transformer of 5 M parameters, an exchange every 10 steps, equal settings, over "
        "loopback. Ray Train 2.60 starts all workers again from a checkpoint written every 10 steps; ours continues "
        "inside the same Ray. hivemind 1.1.12: 100 MB averaged by 2 peers, without its matchmaking; and 10 MB by 3, of "
        "which one is killed in mid-round; it leaves that one's numbers out and ends the round, and the share that the "
        "lost one had yet to average stays different on the others. Horovod 0.28.1 over its "
        "gloo. torchft's newest run, 50 kills of each side, had a quiet machine; the others of 2026-11-19 a busy one, "
        "Ray Train's most of all.",
        ("with_torchft", "with_torchft_local", "with_trainers", "with_ray_train", "with_deepspeed", "with_hivemind",
         "with_horovod"),
        (
            faster(r"torchft_over_ours_step", "the step of torchft over ours", 2.0),
            faster(r"torchft_recovery_over_ours", "from a kill to the next step, torchft over ours", 10.0),
            faster(r"torchft_quick_recovery_over_ours", "the same, torchft with its short wait"),
            shown(r"ours_recovery_s", "from a kill to the next step, ours", "s"),
            Figure(r"ours_worst_recovery_s", "the longest of them", "s", more=False,
                   against="torchft_quick_worst_recovery_s", other="torchft with its short wait"),
            Figure(r"ours_join_pause_s", "the others' longest step as a replacement joins", "s", more=False,
                   against="torchft_join_pause_s", other="torchft",
                   why="all workers form the world anew, and one sends the model to all"),
            shown(r"ours_samples_lost", "samples in no step, ours", ""),
            shown(r"torchft_samples_lost", "samples drawn for steps that did not count, torchft", ""),
            shown(r"torchft_survivors_died", "survivors that ended with an error, and lost their step, torchft", ""),
            shown(r"torchft_quick_survivors_died", "the same, torchft with its short wait", ""),
            faster(r"torchft_over_ours_(local_sgd|diloco)", "ten steps and an exchange by {}, torchft over ours"),
            faster(r"torchft_over_ours_(local_sgd|diloco)_exchange", "the exchange of {} alone"),
            shown(r"loss_difference_(local_sgd|diloco)", "loss at equal settings, {}, torchft over ours less 1", "%"),
            shown(r"ours_(local_sgd|diloco)_bytes", "bytes that a worker sends in an exchange of {}, ours", ""),
            shown(r"torchft_(local_sgd|diloco)_bytes", "the same, {}, torchft", ""),
            faster(r"(accelerate|lightning)_gloo_over_backend", "the step of {} over gloo, over that on our backend"),
            faster(r"(accelerate|lightning)_gloo_over_ours", "the step of {} over gloo, over that with our allreduce"),
            faster(r"ray_train_over_ours_recovery", "from a kill to the next step, Ray Train over ours on Ray"),
            faster(r"ray_train_over_ours_whole", "until three workers train again, Ray Train over ours on Ray"),
            shown(r"ours_on_ray_recovery_s", "from a kill to the next step, ours on Ray", "s"),
            shown(r"ray_train_steps_repeated", "steps made again after a kill, Ray Train", ""),
            shown(r"ours_on_ray_steps_repeated", "the same, ours on Ray", ""),
            faster(r"deepspeed_over_ours_zero_(\d)", "the step of DeepSpeed's ZeRO {} over ours", 1.5),
            faster(r"horovod_over_ours_step", "the step of Horovod over ours"),
            faster(r"horovod_over_ours_(100mb|4kb)", "an all-reduce of {}, Horovod over ours"),
            faster(r"hivemind_over_ours_average", "an average, hivemind over ours", 2.0),
            faster(r"hivemind_over_ours_after_loss", "from a kill in mid-round to the next mean, hivemind over ours",
                   why="hivemind ends the round without the lost one's numbers, ours repeats it"),
            shown(r"hivemind_same_after_loss", "of the numbers, alike on both others after that round, hivemind", "%"),
            shown(r"hivemind_whole_after_loss_s", "until a later mean, hivemind, without its matchmaking", "s"),
            shown(r"hivemind_no_mean_again", "of these kills, those after which hivemind had no mean", ""),
        ),
    ),
    Section(
        "Tables of numbers",
        "`benchmarks/least_squares.py`, `benchmarks/boosting.py`: the other's seconds over ours, 2 workers of one "
        "thread against one process with 2 threads.",
        ("least_squares", "boosting"),
        (
            faster(r"sklearn_over_ours", "least squares, scikit-learn"),
            faster(r"sklearn_over_launched_ours", "the same, with the workers' start"),
            faster(r"sklearn_cholesky_over_ours", "scikit-learn's normal equations (Ridge)"),
            faster(r"mllib_over_ours", "Spark MLlib"),
            Figure(r"speedup_2_workers", "speed-up of a gradient round, 2 workers", "x", against="speedup_2_ceiling",
                   other="the machine allows", slack=0.05),
            faster(r"(xgboost|lightgbm|xgboost_forest)_one_process_over_ours", "{} in one process",
                   all_words="boosting in one process, over 2 workers",
                   why="threads of one process send nothing; workers are for data and cores that one has not"),
            faster(r"(xgboost|lightgbm)_own_ranks_over_ours", "{} on its own 2 ranks",
                   why="the same library on the same ranks: runs differ by as much"),
            shown(r"(xgboost|lightgbm)_quality", "area under the curve, ours less the library's, {}", ""),
        ),
    ),
)  # fmt: skip

# Only what is lost: the tables are on the page of the methods.
ACCURACY = Section(
    "",
    "",
    ("accuracy", "noise"),
    (
        Figure(r"cnn_(\w+)_accuracy", "accuracy of the digits CNN with {}", "%", against="cnn_dense_accuracy",
               other="exact gradients", slack=0.005, all_words="accuracy of the digits CNN after equal samples",
               why="too few bytes, or too much noise, for so short a training; see the method's page"),
        Figure(r"transformer_(\w+)_loss", "loss of the character transformer with {}", "", more=False,
               against="transformer_dense_loss", other="exact gradients", slack=0.05,
               all_words="loss of the character transformer after equal samples",
               why="too few bytes, or too much noise or delay, for so short a training; see the method's page"),
    ),
)  # fmt: skip
