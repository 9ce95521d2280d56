"""RunSpec: what a run-file may say in the sections of the core.

A pick names a capability, and its options belong to that capability. A pick is written short (``loss: ppo-clip``) or
long (``loss: {use: ppo-clip, low: 0.2}``). Units are in the names.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from miles_core.config import yaml12

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PathText = Annotated[str, Field(min_length=1)]
Reduction = Literal["token-mean", "sequence-mean-token-sum", "sequence-mean-token-mean", "fixed-length"]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Pick(BaseModel):
    """A capability by name, with its own options inline. Options are validated by the capability's own model."""

    model_config = ConfigDict(frozen=True, extra="allow")
    use: str = Field(
        description="Name of an installed capability; where the kind is a function, also module:attr or file.py:fn."
    )

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, raw: Any) -> Any:
        return {"use": raw} if isinstance(raw, str) else raw

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class RewardPick(Pick):
    weight: float = Field(default=1.0, allow_inf_nan=False, description="Factor of this reward in the sum; not 0.")

    @field_validator("weight")
    @classmethod
    def _counts(cls, weight: float) -> float:
        if weight == 0:
            raise ValueError("a reward of weight 0 trains nothing; leave it out")
        return weight


def _short(field: str) -> BeforeValidator:
    return BeforeValidator(lambda raw: {field: raw} if isinstance(raw, str) else raw)


class ModelSpec(Section):
    path: PathText
    """Hugging Face folder: config.json, safetensors, tokenizer.json, chat template."""
    context_length: PositiveInt | None = None
    """Most tokens of prompt and output together; null takes the checkpoint's own limit."""


class DataSpec(Section):
    train: PathText
    """JSONL or Parquet file, or folder saved by Hugging Face `datasets`."""
    eval: PathText | None = None
    """Held-out split in the same format; `eval.every_steps` needs it unless the environment brings prompts."""
    prompt_field: str = "prompt"
    """Column with the prompt: text, or a list of messages."""
    label_field: str = "label"
    """Column with the label, passed to rewards; may be absent."""
    tools_field: str = "tools"
    """Column with tools in the OpenAI shape; may be absent."""
    metadata_field: str = "metadata"
    """Column with a mapping passed through unchanged; may be absent."""
    system: str | None = None
    """System message put before prompts that have none."""
    bad_rows: Literal["stop", "skip"] = "stop"
    """Whether an unusable row stops the run or is skipped; skipped rows are counted and reported with their line."""


class SamplingSpec(Section):
    temperature: NonNegativeFloat = 1.0
    """Divides the logits on both sides; 0 samples the argmax."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling; it restricts what is sampled, and never renormalises log-probs."""
    top_k: NonNegativeInt = 0
    """Sample only among the k most probable tokens; 0 is off."""
    min_p: Fraction = 0.0
    """Leave out tokens less probable than this fraction of the most probable one; 0 is off."""
    max_tokens: PositiveInt = 256
    """Most tokens that are sampled in one completion."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Stop strings, besides the stop tokens of the token family."""


class EvalSamplingSpec(SamplingSpec):
    temperature: NonNegativeFloat = 0.0
    """As for training, but 0 by default: greedy."""


class RolloutSpec(Section):
    sampling: SamplingSpec = SamplingSpec()
    """How training trajectories are sampled."""
    over_sample: Annotated[float, Field(ge=1.0, le=16.0)] = 1.0
    """How many groups a wave starts, as a multiple of those still needed; the surplus is aborted once enough are
    accepted."""
    max_waves: PositiveInt = 8
    """Waves of groups that a step tries before the run stops because filters or failures leave too few; in a fully
    asynchronous run, batches of groups in a row."""
    filters: tuple[Pick, ...] = ()
    """Judge finished groups; a group is kept if all of them keep it. `nonzero-std` is dynamic sampling."""
    retries: NonNegativeInt = 2
    """How often a failed trajectory is tried again before it is dropped and counted."""
    trajectory_timeout_s: PositiveFloat = 600.0
    """Deadline of one attempt; generation, tools and environment are included."""
    reward_timeout_s: PositiveFloat = 30.0
    """Deadline of one reward call; when it passes, the worker process is killed."""
    reward_workers: PositiveInt = 2
    """Processes that compute rewards."""
    routes: Literal["off", "record", "replay"] = "off"
    """Experts of MoE layers. With record, the engine returns them, and the trainer counts where its own choice differs;
    with replay, the trainer also uses the recorded ones (R3)."""
    max_concurrent: PositiveInt = 256
    """Most trajectories in flight, also in an evaluation; a fully asynchronous run has
    `schedule.max_concurrent_samples` instead."""
    health_interval_s: PositiveFloat = 10.0
    """How often every engine is asked which version it serves."""
    health_timeout_s: PositiveFloat = 60.0
    """An engine that does not answer in this time is lost: its requests continue on other engines, and it is
    replaced."""
    engine_restarts: NonNegativeInt = 3
    """How often a lost engine is replaced within `engine_restarts_within_s`; attempts that fail do not count. An engine
    that is lost more often stays out until those losses are that long ago, and the run stops if none is left."""
    engine_restarts_within_s: PositiveFloat = 3600.0
    """The window over which `engine_restarts` counts."""
    constant_reward_alarm_steps: NonNegativeInt = 5
    """Raise an alarm after so many steps in which every trajectory has the same reward; 0 is off."""


class SessionSpec(Section):
    family: Pick | None = None
    """Token family (TITO family); null takes the one installed family that claims the checkpoint."""
    matcher: Pick = Pick(use="strict")
    """How replayed messages are compared with stored ones."""
    history: Literal["linear", "branching"] = "linear"
    """linear: one row that grows at its end; branching: a tree of turns, of which every kept leaf is trained."""
    leaves: Literal["all", "drop-retries", "longest"] = "drop-retries"
    """Which leaves of a branching history are kept; drop-retries leaves out what a later sibling supersedes."""


class ObjectiveSpec(Section):
    reduction: Reduction = "token-mean"
    """How token losses become one number; the denominator is always that of the whole update."""
    fixed_length_tokens: PositiveInt | None = None
    """Denominator of `fixed-length` per sequence; null takes `rollout.sampling.max_tokens`."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the initial policy; 0 keeps no reference model."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the KL is added to the loss or subtracted from the reward."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators (joschu.net/blog/kl-approx.html)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """Log-probs of the old policy: recomputed by the trainer before the update, or as the engine recorded them, which
    saves that pass."""
    on_nonfinite: Literal["skip", "stop"] = "stop"
    """Whether a NaN or infinity in loss or gradient skips the update or stops the run."""


class OptimizerSpec(Section):
    lr: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW moments."""
    eps: PositiveFloat = 1e-8
    """AdamW epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; not applied to norms and biases."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    min_lr_ratio: Fraction = 0.0
    """Where linear and cosine end, as a fraction of `lr`."""
    clip_grad_norm: PositiveFloat | None = 1.0
    """Largest global gradient norm; larger gradients are scaled down; null is off."""


class ScheduleSpec(Section):
    mode: Literal["sync", "one-step-off", "fully-async"] = "sync"
    """sync: collect, train, publish in turn. one-step-off: the next batch is collected while this one is trained.
    fully-async: the rollout never stops, the trainer takes whole groups from a buffer."""
    steps: PositiveInt
    """Rollout steps of the whole run."""
    groups_per_step: PositiveInt = 8
    """Prompts whose groups form one step's batch."""
    group_size: PositiveInt = 8
    """Trajectories per prompt."""
    minibatches: PositiveInt = 1
    """Optimizer steps per rollout step; the batch's groups are split among them."""
    update_weights_interval: PositiveInt = 1
    """Publish weights after every so many steps; the age of data counts published versions, not steps."""
    on_weight_update: Literal["retract", "in-place", "abort"] = "retract"
    """What happens to requests in flight at a weight update. retract: their prefix is computed again, and the sampled
    tokens are kept; in-place: they continue with their old key-values; abort: they end."""
    max_concurrent_samples: PositiveInt | None = None
    """Trajectories in flight in a fully asynchronous run; null takes one batch."""
    refill: Literal["sample", "group"] = "sample"
    """When another group starts: once as many trajectories as a group has are finished (sample), or once a whole group
    is (group)."""
    max_weight_staleness: NonNegativeInt | None = None
    """How many published versions the oldest token of a group may be behind when it is trained; null is no limit."""
    unused_groups: Literal["drop", "retry"] = "drop"
    """What happens to prompts whose group failed or grew stale."""
    buffer: Pick = Pick(use="bounded")
    """Holds finished groups until the trainer takes them."""
    drain_s: NonNegativeFloat = 30.0
    """Seconds that trajectories in flight get to finish when the run is stopped; the prompts of the others start again
    when it is resumed."""


class PlacementSpec(Section):
    mode: Literal["colocated", "separate"] = "colocated"
    """colocated: trainer and engines share devices; separate: each has its own."""
    trainer_ranks: PositiveInt = 1
    """Ranks of the trainer."""
    engines: PositiveInt = 1
    """Engine replicas."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA if it is available."""


class PrecisionSpec(Section):
    true_on_policy: bool = False
    """Engine and trainer compute with one set of batch-invariant kernels, so that their log-probs are identical; for
    registered models only, and slower."""


class EvalSpec(Section):
    every_steps: PositiveInt | None = None
    """Evaluate after these steps, before the first and after the last; null is off."""
    prompts: PositiveInt = 64
    """Held-out prompts, always the same ones."""
    samples_per_prompt: PositiveInt = 1
    """Trajectories per held-out prompt."""
    sampling: EvalSamplingSpec = EvalSamplingSpec()
    """How evaluation samples."""
    on: Literal["shared", "dedicated", "external"] = "shared"
    """Who evaluates. shared: the engines that roll out, which meanwhile roll out nothing; dedicated: engines of their
    own; external: a function of yours. The last two read a snapshot of the weights while training continues."""
    engines: PositiveInt | None = None
    """Number of dedicated engines, besides placement.engines."""
    function: str | None = None
    """For external: module:fn or file.py:fn, which is called with the snapshot's folder and `facts` in a process of its
    own."""
    max_in_flight: PositiveInt = 2
    """For dedicated and external: how many evaluations may run or wait, each with its snapshot on disk."""
    overflow: Literal["wait", "skip"] = "wait"
    """What happens when one more is due: training waits for the oldest, or the new one is skipped and counted. The last
    one is never skipped."""
    timeout_s: PositiveFloat = 3600.0
    """For dedicated and external: seconds that one evaluation may take once it has begun."""


class CheckpointSpec(Section):
    every_steps: PositiveInt | None = None
    """Save after these steps; the last step always saves."""
    keep: PositiveInt | None = 2
    """How many of the newest checkpoints are kept; null keeps all."""
    export_hf: bool = True
    """Also write the final weights as a Hugging Face folder."""
    restarts: NonNegativeInt = 2
    """How often within `restarts_within_s` a run that lost a trainer rank returns to its last checkpoint by itself."""
    restarts_within_s: PositiveFloat = 86400.0
    """The window over which `restarts` counts."""


class TrackingSpec(Section):
    dir: PathText = "runs"
    """Folder that holds the run directory."""
    trackers: tuple[Pick, ...] | None = None
    """Trackers besides metrics.jsonl; null takes TensorBoard if it is installed."""
    rollouts_every_steps: PositiveInt = 1
    """Write rollouts/step_*.parquet after these steps."""


class WeightsSpec(Section):
    verify: Literal["always", "sampled", "off"] = "always"
    """Which tensors are compared on the live engines after an update: all, every eighth in turn, or none."""
    probes: Annotated[int, Field(ge=0, le=64)] = 2
    """Number of prompts that each engine continues after an update and the trainer scores; finds caches that outlive
    their weights."""
    timeout_s: PositiveFloat = 1800.0
    """Seconds that staging a version, and each answer of an engine during an update, may take."""


class PluginsSpec(Section):
    disable: tuple[str, ...] = ()
    """Distributions or entry points that are never loaded."""


class RunSpec(Section):
    """A whole run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Name of the run directory."""
    seed: NonNegativeInt = 0
    """Seed from which every random choice is derived."""
    model: Annotated[ModelSpec, _short("path")]
    """The checkpoint that is trained; a bare text is its `path`."""
    data: Annotated[DataSpec | None, _short("train")] = None
    """Prompts; a bare text is `train`. Absent when the environment brings prompts."""
    environment: Pick = Pick(use="chat")
    """Runs one episode per trajectory; `chat` asks for one answer to the prompt."""
    rewards: tuple[RewardPick, ...] = ()
    """Score a finished episode; weighted and summed, together with the environment's own score."""
    rollout: RolloutSpec = RolloutSpec()
    """How trajectories are collected."""
    session: SessionSpec = SessionSpec()
    """How messages become tokens."""
    advantage: Pick = Pick(use="grpo")
    """Turns rewards into per-token advantages."""
    loss: Pick = Pick(use="ppo-clip")
    """Per-token policy loss."""
    corrections: tuple[Pick, ...] = ()
    """Per-token weights from the log-ratio between trainer and rollout; they multiply."""
    objective: ObjectiveSpec = ObjectiveSpec()
    """What is added to the policy loss, and how it is averaged."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """AdamW and its schedule."""
    backend: Pick = Pick(use="fsdp")
    """The trainer."""
    engine: Pick = Pick(use="local")
    """The sampler."""
    transport: Pick = Pick(use="inprocess")
    """Moves each weight version from trainer to engines."""
    executor: Pick = Pick(use="inprocess")
    """Places trainer ranks and engines."""
    schedule: ScheduleSpec
    """How much is done, and in which order things happen."""
    placement: PlacementSpec = PlacementSpec()
    """How many ranks and engines there are, and on which devices."""
    precision: PrecisionSpec = PrecisionSpec()
    """In which arithmetic both sides compute."""
    eval: EvalSpec = EvalSpec()
    """Evaluation on held-out prompts; null is off."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """When to save, and what to keep."""
    tracking: TrackingSpec = TrackingSpec()
    """Where the files of the run are written."""
    weights: WeightsSpec = WeightsSpec()
    """How it is proved that the engines serve what the trainer has."""
    check_weight_update_equal: bool = False
    """Scramble the engines, publish, and compare every tensor before the first step."""
    stall_s: PositiveFloat = 300.0
    """Seconds without progress before the watchdog prints who waits for whom."""
    plugins: PluginsSpec = PluginsSpec()
    """Which plugins may load."""

    @property
    def max_in_flight(self) -> int:
        """Most trajectories in flight, in a rollout or an evaluation."""
        if self.schedule.mode != "fully-async":
            return self.rollout.max_concurrent
        return self.schedule.max_concurrent_samples or self.schedule.groups_per_step * self.schedule.group_size


def dump(spec: RunSpec) -> str:
    """The run-file of a spec: every default written out, null included; loading it gives the same spec."""
    return yaml12.dump(spec.model_dump(mode="json"))
