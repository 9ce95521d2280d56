"""Every metric, declared once: its name, unit and meaning. docs/metrics.md is written from here.

A name may have parts in braces, each standing for one segment, ``correction/{correction}/ratio``, or at the end for all
that follows, ``rollout/reward/{part}``. A run that records a name which is not declared here fails the tests. `clock`
marks figures the wall clock decides; they go to timings.jsonl, everything else to metrics.jsonl, which equal runs write
bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Metric:
    """One declared figure.

    Example:
        Metric("rollout/reward_mean", "reward", "mean reward of the trained trajectories")
    """

    name: str
    unit: str
    help: str
    clock: bool = False


ROLLOUT = (
    Metric("rollout/reward_mean", "reward", "mean reward of the trained trajectories"),
    Metric("rollout/reward_std", "reward", "standard deviation of the same rewards"),
    Metric("rollout/reward_min", "reward", "smallest of the same rewards"),
    Metric("rollout/reward_max", "reward", "largest of the same rewards"),
    Metric("rollout/reward/{part}", "reward", "mean of one reward or reward part, before weights"),
    Metric("rollout/response_tokens_mean", "tokens", "mean sampled tokens of a trained trajectory"),
    Metric("rollout/response_tokens_max", "tokens", "most sampled tokens of a trained trajectory"),
    Metric("rollout/truncated_fraction", "fraction", "trained trajectories that ended by length"),
    Metric("rollout/trained", "trajectories", "trajectories in the batch"),
    Metric("rollout/waves", "waves", "waves of groups the step needed"),
    Metric("rollout/groups_submitted", "groups", "groups started"),
    Metric("rollout/groups_accepted", "groups", "groups in the batch"),
    Metric("rollout/groups_aborted", "groups", "surplus groups of over-sampling, aborted before judgement"),
    Metric("rollout/groups_zero_std", "groups", "accepted groups whose rewards are all equal; they teach nothing"),
    Metric("rollout/filtered/{reason}", "groups", "groups a filter dropped, by reason"),
    Metric("rollout/attempts", "attempts", "finished attempts of judged groups, retries included"),
    Metric("rollout/succeeded", "attempts", "attempts that ended and were scored"),
    Metric("rollout/failed/{boundary}", "attempts", "failed attempts: engine, harness, environment, reward or matcher"),
    Metric("rollout/engine_aborted", "attempts", "attempts the engine aborted"),
    Metric("rollout/timed_out", "attempts", "failed attempts that ran into a deadline"),
    Metric("rollout/retried", "attempts", "failed attempts that were tried again"),
    Metric("rollout/dropped", "trajectories", "trajectories given up after all retries; in no loss and no baseline"),
)
TRAIN = (
    Metric("train/loss", "nats", "reduced loss of the update, KL and entropy terms included"),
    Metric("train/entropy", "nats", "mean entropy of the policy at trained tokens"),
    Metric("train/kl", "nats", "mean KL to the reference policy at trained tokens, by the picked estimator"),
    Metric("train/ratio", "ratio", "mean of policy over old policy, the ratio the loss clips"),
    Metric("train/approx_kl", "nats", "KL(old policy || policy) by k3; how far the update moved within the step"),
    Metric("train/clip_fraction_low", "fraction", "trained tokens clipped at the lower bound"),
    Metric("train/clip_fraction_high", "fraction", "trained tokens clipped at the upper bound; healthy below 0.2"),
    Metric("train/clip_fraction_dual", "fraction", "trained tokens with negative advantage bounded by the dual clip"),
    Metric("train/grad_norm", "norm", "global gradient norm before clipping"),
    Metric("train/lr", "rate", "learning rate of the step's last update"),
    Metric("train/skipped_updates", "updates", "optimizer steps not taken because loss or gradient was not finite"),
)
CONTRACTS = (
    Metric("contract/{contract}/available", "0 or 1", "whether the contract was measured on this step"),
    Metric("contract/tokens/checked_trajectories", "trajectories", "rows whose token contract was checked"),
    Metric("contract/tokens/broken_trajectories", "trajectories", "rows that broke it, or changed on the way"),
    Metric("contract/tokens/sampled_tokens", "tokens", "sampled tokens of the batch"),
    Metric("contract/tokens/trained_tokens", "tokens", "sampled tokens that the loss sees"),
    Metric("contract/tokens/mismatch_rate", "fraction", "rows that differ from their canonical rendering in any way"),
    Metric(
        "contract/tokens/mismatch_unknown", "fraction", "rows whose canonical rendering failed; see `miles inspect`"
    ),
    Metric("contract/tokens/mismatch/{kind}", "fraction", "the same by kind; only assistant_text is expected"),
    Metric("contract/routes/coverage", "fraction", "input tokens with a possible set of experts in every layer"),
    Metric("contract/routes/unrecorded_tokens", "tokens", "input tokens without a record; the trainer's own choice"),
    Metric(
        "contract/routes/different_fraction", "fraction", "(token, layer) pairs sent to other experts than recorded"
    ),
    Metric(
        "contract/routes/own_different_fraction",
        "fraction",
        "pairs for which the trainer alone would have chosen others",
    ),
    Metric("contract/logprobs/abs_diff_mean", "nats", "mean |trainer - rollout log-prob| before the update"),
    Metric("contract/logprobs/abs_diff_max", "nats", "largest |trainer - rollout log-prob| of a trained token"),
    Metric("contract/logprobs/kl_k1", "nats", "KL(rollout || trainer) by k1"),
    Metric("contract/logprobs/kl_k3", "nats", "KL(rollout || trainer) by k3"),
    Metric("contract/logprobs/ratio_mean", "ratio", "mean of trainer over rollout probability of a sampled token"),
    Metric("contract/logprobs/ratio_min", "ratio", "smallest such ratio"),
    Metric("contract/logprobs/ratio_max", "ratio", "largest such ratio"),
    Metric("contract/logprobs/ratio_outside_fraction", "fraction", "trained tokens whose ratio is outside [0, 2]"),
    Metric("contract/logprobs/ratio_bin/{bin}", "fraction", "histogram of that ratio: trained tokens in the bin"),
    Metric("contract/logprobs/fresh_fraction", "fraction", "trained tokens sampled by the trainer's current version"),
    Metric("contract/logprobs/abs_diff_mean_fresh", "nats", "mean |trainer - rollout log-prob| of fresh tokens"),
    Metric("contract/logprobs/abs_diff_max_fresh", "nats", "the largest; 0 with precision.true_on_policy"),
    Metric("contract/versions/proven", "0 or 1", "whether updates compare the served weights with the trainer's"),
    Metric("contract/versions/current", "version", "published weight version when the trainer consumed the batch"),
    Metric("contract/versions/s_old_mean", "versions", "age of a group's oldest token, mean over groups"),
    Metric("contract/versions/s_old_max", "versions", "age of the batch's oldest token"),
    Metric("contract/versions/s_post_mean", "versions", "age of a group's newest token, mean over groups"),
    Metric("contract/versions/delta_gen_mean", "versions", "updates that landed while a group was generated, mean"),
    Metric("contract/versions/delta_gen_max", "versions", "updates that landed while a group was generated, most"),
    Metric("contract/versions/token_staleness", "versions", "age of the typical token: token-weighted mean"),
    Metric("contract/versions/sample_coverage", "fraction", "trajectories with a known version"),
    Metric("contract/versions/token_coverage", "fraction", "sampled tokens with a known version"),
    Metric("contract/versions/mixed_fraction", "fraction", "trajectories that several versions sampled"),
)
CORRECTIONS = (
    Metric("correction/{correction}/ratio", "ratio", "trainer over rollout probability, before any bound"),
    Metric("correction/{correction}/weight", "ratio", "weight after the bound"),
    Metric("correction/{correction}/clipped_fraction", "fraction", "trained tokens whose weight the bound changed"),
    Metric("correction/{correction}/abs_deviation", "ratio", "mean |ratio - 1|"),
    Metric("correction/{correction}/k1", "nats", "KL(rollout || trainer) by k1"),
    Metric("correction/{correction}/k2", "nats", "KL(rollout || trainer) by k2"),
    Metric("correction/{correction}/k3", "nats", "KL(rollout || trainer) by k3"),
    Metric("correction/{correction}/ess", "fraction", "effective sample size of the weights, of the trained tokens"),
    Metric("correction/{correction}/ratio_bin/{bin}", "fraction", "histogram of the ratio: trained tokens in the bin"),
    Metric("correction/{correction}/perplexity_ratio", "ratio", "trainer's over rollout's perplexity"),
)
EVAL = (
    Metric("eval/reward_mean", "reward", "mean reward on the held-out prompts"),
    Metric("eval/reward_stderr", "reward", "standard error of that mean over prompts"),
    Metric("eval/reward/{part}", "reward", "mean of one reward or reward part on the held-out prompts"),
    Metric("eval/response_tokens_mean", "tokens", "mean sampled tokens of a held-out trajectory"),
    Metric("eval/response_tokens_max", "tokens", "most sampled tokens of a held-out trajectory"),
    Metric("eval/truncated_fraction", "fraction", "held-out trajectories that ended by length"),
    Metric("eval/prompts", "prompts", "held-out prompts evaluated"),
    Metric("eval/scored", "trajectories", "held-out trajectories in the mean"),
    Metric("eval/aborted", "trajectories", "held-out trajectories the engine aborted"),
    Metric("eval/failed/{boundary}", "trajectories", "held-out trajectories that failed, by boundary; in no mean"),
    Metric("eval/latency_s", "s", "late score: from the snapshot of its step until it was there", True),
    Metric("eval/lag_steps", "steps", "late score: steps that were trained meanwhile", True),
    Metric("eval/skipped/{reason}", "evaluations", "the evaluation of this step was skipped, and why", True),
)
ASYNC = (
    Metric("async/submitted", "groups", "groups started since the run began"),
    Metric("async/drawn", "groups", "of those, from prompts drawn for the first time"),
    Metric("async/resubmitted", "groups", "of those, from prompts that were put back"),
    Metric("async/put_back", "groups", "prompts put back: unused, or in flight when the run was interrupted"),
    Metric("async/pending", "groups", "groups that have not ended: the next four"),
    Metric("async/generating", "groups", "groups in flight"),
    Metric("async/finished", "groups", "finished groups on their way into the buffer"),
    Metric("async/queued", "groups", "groups in the buffer"),
    Metric("async/taken", "groups", "groups of the batch in training"),
    Metric("async/trained", "groups", "groups trained"),
    Metric("async/failed", "groups", "groups of which no trajectory could be trained"),
    Metric("async/filtered", "groups", "groups that a filter dropped"),
    Metric("async/stale", "groups", "groups that were over the limit on age when they would have been trained"),
    Metric("async/cut", "groups", "groups cut short by the end or an interruption of the run"),
    Metric("async/in_flight_mean", "trajectories", "trajectories in flight, mean over the step", True),
    Metric("async/engine_idle_fraction", "fraction", "of the budget in flight that was unused, mean over time", True),
    Metric("async/trainer_idle_fraction", "fraction", "of the step that the trainer waited for data", True),
    Metric(
        "async/generate_s",
        "s",
        "of generating the batch: trajectory seconds over the budget",
        True,
    ),
    Metric("async/queue_size", "groups", "groups in the buffer at the end of the step", True),
    Metric("async/queue_fill", "fraction", "of the buffer's capacity that was used, mean over time", True),
    Metric("async/blocked_fraction", "fraction", "of the time that a full buffer held the rollout back", True),
    Metric("async/limited_fraction", "fraction", "of the time that the limit on age held the rollout back", True),
)
CLOCK = (
    Metric(
        "time/{phase}_s", "s", "seconds of a phase: start, rollout, wait, log_probs, train, publish, save, eval", True
    ),
    Metric("time/step_s", "s", "seconds of the whole step", True),
    Metric("tokens/batch", "tokens", "tokens of the batch, prompts included", True),
    Metric("tokens/sampled", "tokens", "trained tokens of the batch", True),
    Metric(
        "throughput/rollout_tokens_per_s",
        "tokens/s",
        "trained tokens per second of rollout, or of the step where it never stops",
        True,
    ),
    Metric("throughput/train_tokens_per_s", "tokens/s", "tokens of the batch per second of training", True),
    Metric("rollout/aborted_attempts_finished", "attempts", "finished attempts of aborted surplus groups", True),
    Metric("rollout/aborted_attempts_cut", "attempts", "attempts of aborted surplus groups cut while running", True),
    Metric("rollout/aborted_tokens_finished", "tokens", "sampled tokens of those finished attempts", True),
)
SYNC = (
    Metric("sync/prepare_s", "s", "trainer: gathering and converting the exported tensors", True),
    Metric("sync/digest_s", "s", "trainer: digests of the exported tensors", True),
    Metric("sync/move_s", "s", "trainer: handing them to the transport, waits for the engines included", True),
    Metric("sync/encode_s", "s", "trainer: comparing with the last version and compressing the difference", True),
    Metric("sync/write_s", "s", "trainer: writing the publication", True),
    Metric("sync/stage_s", "s", "from the first export until every engine has staged the version", True),
    Metric("sync/pause_s", "s", "how long the engines did not generate", True),
    Metric("sync/activate_s", "s", "swapping the version in and flushing caches, slowest engine", True),
    Metric("sync/skew_s", "s", "slowest less fastest engine to stage the version", True),
    Metric("sync/verify_s", "s", "proving the live weights: digests of the engines", True),
    Metric("sync/verified_tensors", "tensors", "tensors whose live digest was compared", True),
    Metric("sync/probe_s", "s", "proving by probes: engines continue them, the trainer scores them", True),
    Metric("sync/probe_gap", "nats", "mean |engine - trainer| log-prob of the probe tokens, of the worst engine", True),
    Metric("sync/wire_bytes", "bytes", "bytes the transport moved or wrote", True),
    Metric("sync/density", "fraction", "bytes of the model that changed since the last version", True),
)
SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Rollout": ROLLOUT,
    "Training": TRAIN,
    "The four contracts": CONTRACTS,
    "Corrections": CORRECTIONS,
    "Evaluation": EVAL,
    "Weight updates": SYNC,
    "Asynchronous runs": ASYNC,
    "Wall clock": CLOCK,
}
METRICS: tuple[Metric, ...] = tuple(metric for section in SECTIONS.values() for metric in section)


@cache
def find(name: str) -> Metric | None:
    """The declaration of a recorded name; an exact one before one with braces."""
    for metric in sorted(METRICS, key=lambda metric: "{" in metric.name):
        pattern = re.sub(r"\\\{\w+\\\}$", ".+", re.escape(metric.name))
        if re.fullmatch(re.sub(r"\\\{\w+\\\}", "[^/]+", pattern), name):
            return metric
    return None


def undeclared(names: Iterable[str]) -> list[str]:
    """Those of `names` that nobody declared, sorted; ``step`` is the key of a line and no metric."""
    return sorted(name for name in set(names) - {"step"} if find(name) is None)


def is_clock(name: str) -> bool:
    """Whether the wall clock decides the figure, which then belongs in timings.jsonl."""
    found = find(name)
    return found is not None and found.clock


def as_markdown() -> str:
    """The page docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Written from `miles_core/tracking/names.py`; `make docs` renews it. A step is one line of `metrics.jsonl`;",
        "what the wall clock decides is in `timings.jsonl` under the same `step`: equal runs write equal metrics.",
        "A part in braces stands for a name: a reward part, a filter's reason, a correction, a phase.",
    ]
    for title, section in SECTIONS.items():
        lines += ["", f"## {title}", "", "| name | unit | meaning |", "|---|---|---|"]
        lines += [f"| `{metric.name}` | {metric.unit} | {metric.help.replace('|', '&#124;')} |" for metric in section]
    return "\n".join(lines) + "\n"
