"""Part of evidence.py: every method's row: what its paper claims, what is run for it, and what must be so for the claim
to hold. `unisono strategies` and this file name the same methods; a test compares them.

Variants without a check are there to be seen in the table: they go further than the paper's claim.

Learning rates are those of all-reduce (0.05 and 0.2 for SGD with momentum 0.9, 0.001 and 0.003 for AdamW) unless a
variant says otherwise; none was tuned by method but where VARIANTS gives a reason.
"""

from __future__ import annotations

from typing import NamedTuple

from evidence_links import PARAMETERS
from evidence_rules import (
    Check,
    Results,
    all_of,
    as_good,
    at_most,
    at_the_bound,
    better,
    close,
    equal,
    faster,
    fewer_bytes,
    less_kept,
    less_noise,
    more_windows,
    near_best,
    ring_bytes,
    unbiased,
)
from evidence_tasks import ALONE, WORKERS, Variant

BOTH = ("digits", "text")
SIGN = (0.003, 0.003, 1.0)  # its step is the learning rate itself
ONE_BIT = (0.5, 0.1, 1.0)  # at the text's own rate one-bit gradients diverge
STALE = (1.0, 0.5, 1.0)  # late pushes act as momentum: at the text's own rate they diverge
# The best of 0.1, 0.3, 1 and 3 times the rates above, by `--tune` (2026-11-19: one run each, with a seed of its own).
# Rows with such a variant have a reference that was searched in the same way: several were best at the largest.
SEARCHED_ADAM = (3.0, 3.0, 1.0)
SEARCHED_SGD = (3.0, 1.0, 1.0)
EACH = (0.25, 0.25, 0.25)  # each of the four workers steps with it in full, on a quarter of the batch

OFF_DEVICE = {  # steps on the host, on the task `long`: what is set, and the learning rate that is best by `--tune`
    "cpu": ("", 1.0),
    "cpu_bf16": (", moments=bf16", 1.4),
    "cpu_bf16_exact_lr": (", moments=bf16", 1.0),
    "cpu_defer": (", unit_bytes=65536, defer=4, keep=0.05, delay_after={tenth}", 0.7),
    "cpu_defer_keep": (", unit_bytes=65536, defer=4, keep=0.2, delay_after={tenth}", 0.7),  # that of cpu_defer
    "cpu_delayed": (", delayed_update=True, delay_after={tenth}", 0.5),
}

VARIANTS = {
    "allreduce": Variant("allreduce"),
    "adam": Variant("allreduce", adam=True),
    "allreduce_searched": Variant("allreduce", lr=SEARCHED_SGD),
    "adam_searched": Variant("allreduce", lr=SEARCHED_ADAM, adam=True),
    "one_process": Variant(ALONE),
    "dense": Variant("allreduce(reducer=dense)"),
    "bf16": Variant("bf16"),
    "fp16": Variant("fp16"),
    "bytegrad": Variant("bytegrad"),
    "qsgd_8": Variant("qsgd(bits=8, block=512)"),
    "qsgd_4": Variant("qsgd(bits=4, block=512)"),
    "nuqsgd_4": Variant("nuqsgd(bits=4, block=512)"),
    "nuqsgd_2": Variant("nuqsgd(bits=2, block=512)"),
    "signsgd": Variant("signsgd", lr=SIGN),
    "onebit": Variant("onebit", lr=ONE_BIT),
    "onebit_warm": Variant("warmup(onebit, steps={tenth})", lr=ONE_BIT),
    "onebit_forgets": Variant("onebit(feedback=False)", lr=ONE_BIT),
    "onebit_exact_lr": Variant("allreduce", lr=ONE_BIT),  # all-reduce at the learning rate of onebit
    "onebit_masked": Variant("masked(onebit, min_size=1024)", lr=ONE_BIT),
    "feedback_onebit": Variant("error_feedback(onebit(feedback=False))", lr=ONE_BIT),
    "feedback_bytegrad": Variant("error_feedback(bytegrad)"),
    "powersgd_4": Variant("powersgd(rank=4)"),
    "powersgd_2": Variant("powersgd(rank=2)"),
    "powersgd_1": Variant("powersgd(rank=1)"),
    "powersgd_4_forgets": Variant("powersgd(rank=4, feedback=False)"),
    "accordion": Variant("accordion(powersgd(rank=4), powersgd(rank=1), every=8)"),
    "topk_1": Variant("topk(k=0.01)"),
    "topk_1_forgets": Variant("topk(k=0.01, feedback=False)"),
    "topk_01": Variant("topk(k=0.001)"),
    "topk_10": Variant("topk(k=0.1)"),
    "topk_1_momentum": Variant("topk(k=0.01, momentum=0.9, ramp={tenth})", momentum=0.0),
    "topk_01_momentum": Variant("topk(k=0.001, momentum=0.9, ramp={quarter})", momentum=0.0),
    "topk_01_warm": Variant("warmup(topk(k=0.001), steps={tenth})"),
    "randomk_10": Variant("randomk(k=0.1)"),
    "randomk_10_forgets": Variant("randomk(k=0.1, feedback=False)"),
    "two_hosts": Variant("allreduce", hosts=2),
    "hierarchical": Variant("hierarchical(topk(k=0.01))", hosts=2),
    "topk_1_two_hosts": Variant("topk(k=0.01)", hosts=2),
    "local_sgd": Variant("local_sgd(every=8, start={tenth})"),
    "local_sgd_32": Variant("local_sgd(every=32, start={tenth})"),
    "post_local_sgd": Variant("local_sgd(every=8, start='decay')"),
    "diloco": Variant("diloco(every=20)", adam=True),
    "diloco_searched": Variant("diloco(every=20)", lr=(1.0, 3.0, 1.0), adam=True),
    "diloco_plain_outer": Variant("diloco(every=20, outer_lr=1.0, outer_momentum=0.0, nesterov=False)", adam=True),
    "diloco_streaming": Variant("diloco(every=20, fragments=4, delay=2)", adam=True),
    "crossbow": Variant("crossbow"),
    "crossbow_2_learners": Variant("crossbow(learners=2)"),
    "crossbow_every_4": Variant("crossbow(every=4)"),
    "gossip_ring": Variant("gossip(ring)"),
    "gossip_exponential": Variant("gossip(exponential)"),
    "gossip_8bit": Variant("gossip(ring, bits=8)"),
    "async_average": Variant("async_average(every_s=0.02)"),
    "server_0": Variant("parameter_server(staleness=0)"),
    "server_4": Variant("parameter_server(staleness=4)", lr=STALE),
    "server_64": Variant("parameter_server(staleness=64)", lr=STALE),
    "server_async": Variant("parameter_server(staleness=None)", lr=STALE),
    "hogwild": Variant("hogwild", lr=EACH),
    "qadam": Variant("qadam(warmup={quarter})", adam=True),
    "qadam_onebit": Variant("qadam(warmup={quarter}, reducer=onebit)", adam=True),
    "qadam_early": Variant("qadam(warmup=5)", adam=True),
    "zero_one_adam": Variant("zero_one_adam(warmup={tenth}, start={quarter}, double=8, every=16)", adam=True),
    "zero_one_adam_exact": Variant(
        "zero_one_adam(warmup={tenth}, start={quarter}, double=8, every=16, reducer=dense)", adam=True
    ),
    "muon": Variant("allreduce", muon=True),
    "shared_muon": Variant("shared", muon=True),
    "zero_2_muon": Variant("zero(stage=2)", muon=True),
    "shared": Variant("shared"),
    "shared_fused": Variant("shared", fused=True),
    "allreduce_fused": Variant("allreduce", fused=True),
    "zero_1": Variant("zero(stage=1)", adam=True),
    "zero_2": Variant("zero(stage=2)", adam=True),
    "zero_3": Variant("zero(stage=3)", adam=True),
    **{
        name: Variant(f"zero(stage=2, optimizer_on=cpu{more})", lr=(1.0, rate, 1.0), adam=True)
        for name, (more, rate) in OFF_DEVICE.items()
    },
    "sparseloco": Variant("sparseloco(every=20)", lr=SEARCHED_ADAM, adam=True),
    "sparseloco_8": Variant("sparseloco(every=20, k=512)", lr=SEARCHED_ADAM, adam=True),
    "async_diloco": Variant("async_diloco(every=20)", lr=(1.0, 3.0, 1.0), adam=True),  # that of diloco
    "ef21": Variant("ef21(topk(k=0.01, feedback=False))", lr=(10.0, 3.0, 10.0), momentum=0.0),
    "ef21_10": Variant("ef21(topk(k=0.1, feedback=False))", lr=(30.0, 3.0, 10.0), momentum=0.0),
    "loco": Variant("loco"),
    "loco_forgets": Variant("loco(reset=1)"),
    "cocktail": Variant("cocktail", lr=(1.0, 0.3, 1.0)),
    "fp8": Variant("fp8"),
    "demo": Variant("demo", lr=(0.09, 0.09, 1.0), momentum=0.0),
    "sparta": Variant("sparta(share=0.005)", lr=SEARCHED_ADAM, adam=True),
    "sparta_5": Variant("sparta(share=0.05)", lr=SEARCHED_ADAM, adam=True),
    "auto": Variant("auto(among=[allreduce, bf16, bytegrad, powersgd(rank=4)], check_every=10, trial_steps=3)"),
}


class Row(NamedTuple):
    """A method: the claim with its source, the variants that are run (the first is the reference), on which tasks, and
    the checks. `links`: the variants of which steps are timed on shaped links. `note`: what a reader should know."""

    claim: str
    source: str
    variants: tuple[str, ...]
    checks: list[Check]
    tasks: tuple[str, ...] = BOTH
    links: tuple[str, ...] = ()
    note: str = ""


ROWS = {
    "allreduce": Row(
        "Averaging gradients after every backward pass is mathematically the same as training in one process.",
        "Li et al. 2020, PyTorch Distributed, section 3 (arXiv:2006.15704)",
        ("one_process", "allreduce"),
        all_of(
            equal("allreduce", "one_process", "text", 0.005),
            as_good("allreduce", "one_process", *BOTH),
        ),
        links=("allreduce",),
    ),
    "dense": Row(
        "A ring all-reduce sends 2(N-1)/N of the data from each process, the least there is.",
        "Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms (J. Parallel Distrib. Comput. 69)",
        ("allreduce", "dense"),
        all_of(
            ring_bytes("dense", WORKERS),
            equal("dense", "allreduce", "text", 1e-6),
            at_the_bound("dense", 100, 2 * (WORKERS - 1) / WORKERS * 4 * PARAMETERS, 1.25),
        ),
        links=("dense",),
    ),
    "bf16": Row(
        "Training with bfloat16 gets the results of float32 in as many iterations, with no hyper-parameter changed.",
        "Kalamkar et al. 2019, A Study of BFLOAT16, abstract (arXiv:1905.12322)",
        ("allreduce", "bf16"),
        all_of(
            as_good("bf16", "allreduce", *BOTH),
            fewer_bytes("bf16", "allreduce", 0.51),
            faster("bf16", "allreduce", 100, 1.5),
        ),
        links=("bf16",),
    ),
    "fp16": Row(
        "Half-precision gradients lose no accuracy, with the same hyper-parameters (small ones need loss scaling).",
        "Micikevicius et al. 2018, Mixed Precision Training, abstract and section 3.2 (arXiv:1710.03740)",
        ("allreduce", "fp16"),
        all_of(
            as_good("fp16", "allreduce", *BOTH),
            fewer_bytes("fp16", "allreduce", 0.51),
            faster("fp16", "allreduce", 100, 1.5),
        ),
        links=("fp16",),
    ),
    "bytegrad": Row(
        "Gradients of 8 bits converge as full precision does, and training is faster where the network is slow.",
        "Gan et al. 2021, BAGUA, evaluation (arXiv:2107.01499)",
        ("allreduce", "bytegrad"),
        all_of(
            as_good("bytegrad", "allreduce", *BOTH),
            fewer_bytes("bytegrad", "allreduce", 0.26),
            faster("bytegrad", "allreduce", 100, 2),
        ),
        links=("bytegrad",),
    ),
    "qsgd": Row(
        "Random rounding to a few levels is unbiased, and with 4 or 8 bits trains to full accuracy.",
        "Alistarh et al. 2017, QSGD, lemma 3.1 and experiments (arXiv:1610.02132)",
        ("allreduce", "qsgd_8", "qsgd_4"),
        all_of(
            unbiased("qsgd_4"),
            as_good("qsgd_8", "allreduce", *BOTH),
            as_good("qsgd_4", "allreduce", *BOTH),
            fewer_bytes("qsgd_8", "allreduce", 0.27),
            fewer_bytes("qsgd_4", "allreduce", 0.14),
            faster("qsgd_4", "allreduce", 100, 2),
        ),
        tasks=(*BOTH, "noise"),
        links=("qsgd_8", "qsgd_4"),
    ),
    "nuqsgd": Row(
        "Levels that halve towards zero have less variance than QSGD's at equal bits, and train as well as exact SGD.",
        "Ramezani-Kebrya et al. 2021, NUQSGD, abstract and theorems (arXiv:2104.13818)",
        ("allreduce", "nuqsgd_4", "nuqsgd_2", "qsgd_4"),
        all_of(
            unbiased("nuqsgd_4"),
            less_noise("nuqsgd_4", "qsgd_4"),
            as_good("nuqsgd_4", "allreduce", *BOTH),
            better("nuqsgd_4", "qsgd_4", *BOTH),
            fewer_bytes("nuqsgd_4", "allreduce", 0.14),
            faster("nuqsgd_4", "allreduce", 100, 2),
        ),
        tasks=(*BOTH, "noise"),
        links=("nuqsgd_4",),
    ),
    "signsgd": Row(
        "The majority of signs, 1 bit each way, converges as SGD does.",
        "Bernstein et al. 2018, signSGD, abstract (arXiv:1802.04434)",
        ("allreduce", "signsgd"),
        all_of(
            as_good("signsgd", "allreduce", *BOTH),
            fewer_bytes("signsgd", "allreduce", 0.05),
            faster("signsgd", "allreduce", 100, 4),
        ),
        links=("signsgd",),
        note="Its learning rate is 0.003 of all-reduce's on both tasks: every number of its step has the size of the "
        "learning rate.",
    ),
    "onebit": Row(
        "Gradients of 1 bit cost no or nearly no accuracy if the rounding error is carried to the next step.",
        "Seide et al. 2014, 1-Bit Stochastic Gradient Descent (Interspeech), abstract",
        ("allreduce", "onebit", "onebit_warm", "onebit_forgets", "onebit_exact_lr"),
        all_of(
            as_good("onebit", "allreduce", *BOTH),
            as_good("onebit", "onebit_exact_lr", *BOTH),
            as_good("onebit_warm", "onebit_exact_lr", *BOTH),
            better("onebit", "onebit_forgets", *BOTH),
            fewer_bytes("onebit", "allreduce", 0.07),
            faster("onebit", "allreduce", 100, 4),
        ),
        links=("onebit",),
        note="One-bit gradients diverge on the text at all-reduce's learning rate. So they have a smaller one, and are "
        "compared with exact gradients at that rate (`onebit_exact_lr`) too: neither has learned all it can in "
        "240 steps.",
    ),
    "error_feedback": Row(
        "A biased compressor with error feedback converges as SGD does; without, it may not.",
        "Karimireddy et al. 2019, Error Feedback Fixes SignSGD, abstract and section 4 (arXiv:1901.09847)",
        ("allreduce", "feedback_onebit", "onebit_forgets", "onebit_exact_lr", "feedback_bytegrad", "bytegrad"),
        all_of(
            better("feedback_onebit", "onebit_forgets", *BOTH),
            as_good("feedback_onebit", "onebit_exact_lr", *BOTH),
            as_good("feedback_bytegrad", "allreduce", *BOTH),
            fewer_bytes("feedback_onebit", "onebit_forgets", 1.001),
        ),
        links=("feedback_onebit", "feedback_bytegrad"),
        note="One-bit gradients diverge on the text at all-reduce's learning rate. So they have a smaller one, and are "
        "compared with exact gradients at that rate (`onebit_exact_lr`) too: neither has learned all it can in "
        "240 steps.",
    ),
    "powersgd": Row(
        "Gradients of low rank with error feedback reach the test performance of SGD with far fewer bytes, and faster.",
        "Vogels et al. 2019, PowerSGD, abstract and section 4 (arXiv:1905.13727)",
        ("allreduce", "powersgd_4", "powersgd_2", "powersgd_1", "powersgd_4_forgets"),
        all_of(
            as_good("powersgd_4", "allreduce", *BOTH),
            as_good("powersgd_2", "allreduce", *BOTH),
            better("powersgd_4", "powersgd_4_forgets", *BOTH),
            fewer_bytes("powersgd_4", "allreduce", 0.12),
            faster("powersgd_4", "allreduce", 100, 4),
            faster("powersgd_4", "allreduce", 1000),
        ),
        links=("powersgd_4", "powersgd_1"),
        note="It compresses from the first step on; the page of the method recommends a [warmup](methods/warmup.md).",
    ),
    "accordion": Row(
        "Little compression in critical regimes, much otherwise: the accuracy of the former, near the bytes "
        "of the latter.",
        "Agarwal et al. 2021, Accordion, abstract and section 5 (arXiv:2010.16248)",
        ("allreduce", "accordion", "powersgd_4", "powersgd_1"),
        all_of(
            as_good("accordion", "powersgd_4", *BOTH),
            better("accordion", "powersgd_1", *BOTH),
            fewer_bytes("accordion", "powersgd_4", 0.6),
            fewer_bytes("accordion", "powersgd_4", 0.6, "digits"),
            faster("accordion", "allreduce", 100, 4),
        ),
        links=("accordion",),
        note="240 steps are 30 periods of 8 steps here; the paper's periods have about 1,000 steps each.",
    ),
    "topk": Row(
        "The largest hundredth or thousandth of gradients is enough: with memory at the rate of SGD, with "
        "momentum correction and warm-up without loss of accuracy.",
        "Stich et al. 2018, Sparsified SGD with Memory, abstract (arXiv:1809.07599); Lin et al. 2018, Deep "
        "Gradient Compression, abstract and section 3 (arXiv:1712.01887)",
        ("allreduce", "topk_1", "topk_1_forgets", "topk_1_momentum", "topk_01", "topk_01_momentum"),
        all_of(
            as_good("topk_1", "allreduce", *BOTH),
            better("topk_1", "topk_1_forgets", *BOTH),
            as_good("topk_1_momentum", "allreduce", *BOTH),
            better("topk_01_momentum", "topk_01", *BOTH),
            as_good("topk_01_momentum", "allreduce", *BOTH),
            fewer_bytes("topk_1", "allreduce", 0.06),
            faster("topk_1", "allreduce", 100, 4),
        ),
        links=("topk_1",),
        note="It is sparse from the first step on but for `ramp`, which is the warm-up of Deep Gradient Compression. A "
        "thousandth of these small matrices is a few numbers.",
    ),
    "randomk": Row(
        "Random places with memory converge at the rate of SGD too; in practice top-k is ahead at equal k.",
        "Stich et al. 2018, Sparsified SGD with Memory, abstract and section 4 (arXiv:1809.07599)",
        ("allreduce", "randomk_10", "randomk_10_forgets", "topk_10"),
        all_of(
            as_good("randomk_10", "allreduce", *BOTH),
            better("randomk_10", "randomk_10_forgets", *BOTH),
            better("topk_10", "randomk_10", *BOTH),
            fewer_bytes("randomk_10", "allreduce", 0.12),
            faster("randomk_10", "allreduce", 100, 4),
        ),
        links=("randomk_10",),
        note="A number waits for 10 steps on average until its place is drawn. At all-reduce's learning rate, one of "
        "three seeds of the text ended above the loss that it began with.",
    ),
    "warmup": Row(
        "Little or no sparsity in the first steps, when gradients change quickly, ends at a better model.",
        "Lin et al. 2018, Deep Gradient Compression, section 3.3 (arXiv:1712.01887)",
        ("allreduce", "topk_01_warm", "topk_01"),
        all_of(
            better("topk_01_warm", "topk_01", *BOTH),
            fewer_bytes("topk_01_warm", "allreduce", 0.13),
        ),
        links=("topk_01_warm",),
        note="Most of the bytes of `topk_01_warm` are those of its first tenth, which is exact.",
    ),
    "masked": Row(
        "Vectors and small tensors are worth sending exactly: they are few bytes, and compression harms them.",
        "As done by Vogels et al. 2019 (arXiv:1905.13727) and others; no figure of theirs",
        ("allreduce", "onebit_masked", "onebit", "onebit_exact_lr"),
        all_of(
            better("onebit_masked", "onebit", *BOTH),
            as_good("onebit_masked", "onebit_exact_lr", *BOTH),
            fewer_bytes("onebit_masked", "allreduce", 0.1),
        ),
        links=("onebit_masked",),
        note="The mean is better than that of `onebit` on both tasks, but by less than the seeds or the margin: three "
        "seeds do not show it.",
    ),
    "hierarchical": Row(
        "Adding inside a host first, and across hosts by one rank each, sends less over the network at no loss.",
        "Goyal et al. 2017, section 4 (arXiv:1706.02677); Gan et al. 2021, BAGUA (arXiv:2107.01499)",
        ("two_hosts", "hierarchical", "topk_1_two_hosts"),
        all_of(
            as_good("hierarchical", "topk_1_two_hosts", *BOTH),
            fewer_bytes("hierarchical", "topk_1_two_hosts", 0.5),
            faster("hierarchical", "two_hosts", 100, 4),
            faster("hierarchical", "topk_1_two_hosts", 100),
        ),
        links=("two_hosts", "hierarchical", "topk_1_two_hosts"),
    ),
    "local_sgd": Row(
        "Averaging models every H steps, H up to about the root of their number, converges at the rate of "
        "mini-batch SGD; begun after the first decay it generalises better than large batches.",
        "Stich 2019, Local SGD, abstract (arXiv:1805.09767); Lin et al. 2020, post-local SGD, abstract "
        "(arXiv:1808.07217)",
        ("allreduce", "local_sgd", "local_sgd_32", "post_local_sgd"),
        all_of(
            as_good("local_sgd", "allreduce", *BOTH),
            better("post_local_sgd", "allreduce", *BOTH),
            fewer_bytes("local_sgd", "allreduce", 0.22),
            faster("local_sgd", "allreduce", 100, 4),
        ),
        links=("local_sgd", "local_sgd_32"),
        note="Post-local SGD is said to be better than large batches; those here are small (64 and 32 samples), and "
        "leave little to gain.",
    ),
    "diloco": Row(
        "Hundreds of inner AdamW steps and an outer Nesterov step on their mean: as good as synchronous "
        "training, and better than plain averaging; in fragments and overlapped as good again.",
        "Douillard et al. 2023, DiLoCo, abstract and outer optimizers (arXiv:2311.08105); Douillard et al. "
        "2025, Streaming DiLoCo, abstract (arXiv:2501.18512)",
        ("adam", "diloco", "diloco_plain_outer", "diloco_streaming"),
        all_of(
            as_good("diloco", "adam", *BOTH),
            better("diloco", "diloco_plain_outer", *BOTH),
            as_good("diloco_streaming", "diloco", *BOTH),
            fewer_bytes("diloco", "adam", 0.06),
            faster("diloco", "adam", 100, 8),
            faster("diloco_streaming", "diloco", 100),
        ),
        links=("adam", "diloco", "diloco_streaming"),
        note="240 steps have 12 outer steps of 20 inner ones; the paper's runs have hundreds of inner steps for each "
        "outer one, and many more of these.",
    ),
    "crossbow": Row(
        "Many small-batch learners around a central model: as good as synchronous SGD on the joined batch, "
        "with more learners at no more bytes.",
        "Koliousis et al. 2019, Crossbow, abstract and evaluation (arXiv:1901.02244)",
        ("allreduce", "crossbow", "crossbow_2_learners", "crossbow_every_4"),
        all_of(
            as_good("crossbow", "allreduce", *BOTH),
            as_good("crossbow_2_learners", "allreduce", *BOTH),
            fewer_bytes("crossbow_2_learners", "allreduce", 1.02),
        ),
        links=("crossbow", "crossbow_every_4"),
        note="All variants see the same samples. With two learners a worker these take turns, so that each makes half "
        "of the steps.",
    ),
    "gossip": Row(
        "Averaging with neighbours only converges as all-reduce does, also with 8 bits and on sparse changing "
        "graphs, and is faster on slow networks than a central server or an all-reduce.",
        "Lian et al. 2017, D-PSGD, abstract (arXiv:1705.09056); Tang et al. 2018 (arXiv:1803.06443); Ying et "
        "al. 2021 (arXiv:2110.13363)",
        ("allreduce", "gossip_ring", "gossip_exponential", "gossip_8bit"),
        all_of(
            as_good("gossip_ring", "allreduce", *BOTH),
            as_good("gossip_exponential", "allreduce", *BOTH),
            as_good("gossip_8bit", "allreduce", *BOTH),
            fewer_bytes("gossip_8bit", "allreduce", 0.35),
            faster("gossip_ring", "server_0", 100),
            faster("gossip_ring", "allreduce", 100),
            faster("gossip_exponential", "allreduce", 100),
            faster("gossip_8bit", "allreduce", 100),
        ),
        links=("server_0", "gossip_ring", "gossip_exponential", "gossip_8bit"),
        note="A ring of 4 sends 4/3 of the bytes of an all-reduce. The claim is about networks in which many workers, "
        "or latency, make an all-reduce slow.",
    ),
    "async_average": Row(
        "Models averaged in the background: nobody waits, neither for the network nor for a slow worker, at "
        "little loss.",
        "Gan et al. 2021, BAGUA, evaluation (arXiv:2107.01499)",
        ("allreduce", "async_average"),
        all_of(
            as_good("async_average", "allreduce", *BOTH),
            more_windows("async_average", "allreduce", 1.5),
            faster("async_average", "allreduce", 100, 4),
        ),
        tasks=(*BOTH, "slow"),
        links=("async_average",),
    ),
    "parameter_server": Row(
        "Servers with bounded staleness train as synchronous ones do, no worker is ahead by more than the "
        "bound, and a slow worker does not hold up the others.",
        "Ho et al. 2013, Stale Synchronous Parallel, abstract (NIPS); Li et al. 2014, Parameter Server (OSDI)",
        ("allreduce", "server_0", "server_4", "server_async", "server_64"),
        all_of(
            equal("server_0", "allreduce", "text", 0.005),
            as_good("server_4", "allreduce", *BOTH),
            as_good("server_4", "server_async", *BOTH),
            at_most("server_4", "text", "ahead", 4, "no window of `server_4` began more than 4 ahead of the slowest"),
            more_windows("server_64", "allreduce", 1.5),
        ),
        tasks=(*BOTH, "slow"),
        links=("server_0", "server_4"),
        note="On the text, servers with staleness have half of all-reduce's learning rate, as they diverge at its own.",
    ),
    "hogwild": Row(
        "Steps without locks on one shared model: where gradients are sparse, they cost next to nothing, and "
        "nobody waits.",
        "Niu et al. 2011, Hogwild!, abstract (arXiv:1106.5730)",
        ("allreduce", "hogwild"),
        all_of(
            as_good("hogwild", "allreduce", "sparse"),
            more_windows("hogwild", "allreduce", 1.5),
            fewer_bytes("hogwild", "allreduce", 0.01),
        ),
        tasks=("sparse", *BOTH, "slow"),
    ),
    "qadam": Row(
        "Adam with its variance frozen after a warm-up and momenta of 1 byte or 1 bit converges as Adam does; "
        "frozen too early it does not.",
        "Tang et al. 2021, 1-bit Adam, abstract and section 3 (arXiv:2102.02888)",
        ("adam", "qadam", "qadam_onebit", "qadam_early"),
        all_of(
            as_good("qadam", "adam", *BOTH),
            as_good("qadam_onebit", "adam", *BOTH),
            better("qadam", "qadam_early", *BOTH),
            fewer_bytes("qadam", "adam", 0.45),
            fewer_bytes("qadam_onebit", "adam", 0.31),
            faster("qadam", "adam", 100, 1.5),
        ),
        links=("adam", "qadam", "qadam_onebit"),
        note="One-bit momenta diverged on the digits with every seed: probably because all numbers of a tensor then "
        "have one size, also those whose frozen variance is almost zero.",
    ),
    "zero_one_adam": Row(
        "Adam with its variance frozen on a schedule, momenta of 1 bit and local steps converges as Adam does, with up "
        "to 87 % less data than 1-bit Adam.",
        "Lu et al. 2022, 0/1 Adam, abstract (arXiv:2202.06009)",
        ("adam", "qadam_onebit", "zero_one_adam", "zero_one_adam_exact"),
        all_of(
            as_good("zero_one_adam", "adam", *BOTH),
            as_good("zero_one_adam_exact", "adam", *BOTH),
            fewer_bytes("zero_one_adam", "qadam_onebit", 0.5),
        ),
        links=("adam", "zero_one_adam"),
        note="Local steps begin after a quarter of 240 steps here, and the paper's runs have 100,000 and more. On the "
        "digits v stands after 24 steps, which is too early there, as for `qadam(warmup=24)`: with exact means one of "
        "three runs diverged, too.",
    ),
    "shared": Row(
        "One model in the memory of a host for all its workers: the numbers of all-reduce, and nothing is sent.",
        "Our own method (no paper): the page of the method, first section",
        ("allreduce", "shared", "allreduce_fused", "shared_fused", "muon", "shared_muon"),
        all_of(
            equal("shared_fused", "allreduce_fused", "text", 1e-6),
            equal("shared_fused", "allreduce_fused", "digits", 1e-6),
            as_good("shared", "allreduce", *BOTH),
            equal("shared_muon", "muon", "text", 0.005),
            fewer_bytes("shared", "allreduce", 0.01),
        ),
        links=("two_hosts", "shared"),
        note="torch's fused kernels and its other ones round a last digit differently, and `shared` steps by the fused "
        "ones unless the program asks for others. With `fused=True` on both sides the numbers are the same; by "
        "default they part slowly.",
    ),
    "zero": Row(
        "Splitting state over N workers changes no result; stage 3 keeps 1/N of it all, and sends 1.5 times the bytes. "
        "Steps on the host may come one step late, or be put off but for a few parameters, at the same accuracy.",
        "Rajbhandari et al. 2020, ZeRO, sections 5 and 7 (arXiv:1910.02054); Ren et al. 2021, ZeRO-Offload, section "
        "5.2 (arXiv:2101.06840); Lan et al. 2025, ZenFlow, abstract (arXiv:2505.12242)",
        ("adam", "zero_1", "zero_2", "zero_3", "muon", "zero_2_muon", *OFF_DEVICE),
        all_of(
            equal("zero_1", "adam", "text", 0.005),
            equal("zero_2", "adam", "text", 0.005),
            equal("zero_3", "adam", "text", 0.005),
            equal("zero_2_muon", "muon", "text", 0.005),
            less_kept("zero_2", "adam", 0.52),
            less_kept("zero_3", "adam", 0.27),
            fewer_bytes("zero_2", "adam", 1.02),
            fewer_bytes("zero_3", "adam", 1.55),
            *(close(name, "cpu", "long", 0.005) for name in OFF_DEVICE if name != "cpu"),
        ),
        tasks=(*BOTH, "long"),
        links=("adam", "zero_2", "zero_3"),
        note="The 4 workers are on one host, where stages 1 and 2 have one model together and gather nothing: that is "
        "half of the bytes. Between hosts they send what `adam` sends, as the steps on links show.",
    ),
    "sparseloco": Row(
        "Differences of models as 1 to 3 % of their numbers in 2 bits, with memory in the place of outer momentum: as "
        "good as DiLoCo with exact differences, or better.",
        "Sarfi et al. 2025, SparseLoCo, abstract (arXiv:2508.15706)",
        ("adam_searched", "diloco_searched", "sparseloco", "sparseloco_8"),
        all_of(
            as_good("sparseloco", "diloco_searched", *BOTH),
            as_good("sparseloco_8", "diloco_searched", *BOTH),
            fewer_bytes("sparseloco", "diloco_searched", 0.05),
        ),
        links=("adam", "sparseloco"),
    ),
    "async_diloco": Row(
        "Local training without a barrier, with delayed Nesterov momentum, learns as the synchronous kind does.",
        "Liu et al. 2024, Asynchronous Local-SGD, abstract (arXiv:2401.09135)",
        ("adam_searched", "diloco_searched", "async_diloco"),
        all_of(
            as_good("async_diloco", "diloco_searched", *BOTH),
            fewer_bytes("async_diloco", "adam_searched", 0.1),
        ),
        links=("adam", "async_diloco"),
    ),
    "ef21": Row(
        "Estimates of momenta, corrected by their largest numbers, converge as SGD does, whatever the batch.",
        "Fatkhullin et al. 2023, Momentum Provably Improves Error Feedback, abstract (arXiv:2305.15155)",
        ("allreduce_searched", "topk_1", "ef21", "ef21_10"),
        all_of(
            as_good("ef21", "allreduce_searched", *BOTH),
            as_good("ef21", "topk_1", *BOTH),
            fewer_bytes("ef21", "allreduce_searched", 0.07),
        ),
        links=("ef21",),
    ),
    "loco": Row(
        "4 bits with the moving average of their error train as full precision does.",
        "Xie et al. 2024, LoCo, abstract (arXiv:2407.04480)",
        ("allreduce", "loco", "loco_forgets"),
        all_of(
            as_good("loco", "allreduce", *BOTH),
            fewer_bytes("loco", "allreduce", 0.14),
            faster("loco", "allreduce", 100, 2),
        ),
        links=("loco",),
    ),
    "cocktail": Row(
        "Random, then the largest, then few bits, with error feedback: 100 times fewer bytes at no loss.",
        "Wang et al. 2023, CocktailSGD, abstract (ICML 2023)",
        ("allreduce_searched", "cocktail"),
        all_of(
            as_good("cocktail", "allreduce_searched", *BOTH),
            fewer_bytes("cocktail", "allreduce_searched", 0.04),
            faster("cocktail", "allreduce", 100, 4),
        ),
        links=("cocktail",),
    ),
    "fp8": Row(
        "8-bit floating point with scales trains as 16 bits do.",
        "Micikevicius et al. 2022, FP8 Formats for Deep Learning, abstract (arXiv:2209.05433)",
        ("allreduce", "bf16", "fp8"),
        all_of(
            as_good("fp8", "bf16", *BOTH),
            fewer_bytes("fp8", "allreduce", 0.26),
            faster("fp8", "allreduce", 100, 2),
        ),
        links=("fp8",),
    ),
    "demo": Row(
        "Momenta that stay local, with their strongest frequencies exchanged, train as AdamW does.",
        "Peng et al. 2024, DeMo, abstract (arXiv:2411.19870)",
        ("adam_searched", "demo"),
        all_of(
            as_good("demo", "adam_searched", *BOTH),
            fewer_bytes("demo", "adam_searched", 0.06),
        ),
        links=("adam", "demo"),
    ),
    "sparta": Row(
        "Averaging 0.05 to 0.5 % of the parameters in each step keeps workers together at a thousandth of the bytes.",
        "EXO Labs 2025, SPARTA (report)",
        ("adam_searched", "sparta", "sparta_5"),
        all_of(
            as_good("sparta", "adam_searched", *BOTH),
            fewer_bytes("sparta", "adam_searched", 0.03),
        ),
        links=("adam", "sparta"),
    ),
    "auto": Row(
        "The fastest method is found by measuring during training, at no loss.",
        "Our own method (no paper); after Gan et al. 2021, BAGUA (arXiv:2107.01499)",
        ("allreduce", "auto"),
        all_of(
            as_good("auto", "allreduce", *BOTH),
            faster("auto", "allreduce", 100, 1.5, main=True),
            near_best("auto", ("allreduce", "bf16", "bytegrad", "powersgd_4"), 100, 1.25),
            near_best("auto", ("allreduce", "bf16", "bytegrad", "powersgd_4"), 1000, 1.25),
        ),
        links=("auto",),
        note="Its bytes are more than all-reduce's because it measures the link: these messages are large beside so "
        "small a model. In the memory of one host they cost little.",
    ),
}
TWO_HOSTS = ("two_hosts", "hierarchical", "topk_1_two_hosts", "shared")  # timed on 2 hosts of 2 workers, others on 4
ONLY = {  # the variants that are run on other tasks than BOTH
    "noise": ("qsgd_4", "qsgd_8", "nuqsgd_4", "nuqsgd_2"),
    "slow": ("allreduce", "async_average", "server_64", "hogwild"),
    "sparse": ("allreduce", "hogwild"),
    "long": tuple(OFF_DEVICE),
}
UNTRAINED = ("server_64", *OFF_DEVICE)  # on BOTH: for another task alone


def variants_of(method: str, task: str) -> list[str]:
    """What is run of a row on a task."""
    row = ROWS[method]
    if task not in row.tasks:
        return []
    return [name for name in row.variants if (name in ONLY[task] if task in ONLY else name not in UNTRAINED)]


def of_row(method: str, results: Results) -> Results:
    """The results that a row is judged by: of the place that has most of its runs."""
    return results.of_one_place([(name, task) for task in ROWS[method].tasks for name in variants_of(method, task)])


def links_of(method: str) -> list[str]:
    """What is timed of a row: with what it is compared to."""
    row = ROWS[method]
    if not row.links:
        return []
    reference = "two_hosts" if row.links[-1] in TWO_HOSTS else "adam" if VARIANTS[row.links[-1]].adam else "allreduce"
    chosen = ["bf16", "bytegrad", "powersgd_4"] if method == "auto" else []
    return list(dict.fromkeys([reference, *chosen, *row.links]))
