"""The policy: encoder, recurrent core, action head and value head, with the observation statistics inside.

    observations ─ input rule ─ statistics ─ encoder ─ core ─┬─ action head ─ distribution
                                                             └─ value head

Two ways through it, over the same weights: `step` and `value` for actors, one row per env, and `evaluate_sequences`
for the learner, whole rows of a rollout. Both must give the same log-probs (the ratio law, tests/policy). Actors read
weights through `load_arrays`; the learner alone trains them and updates the statistics. What must never happen:
statistics that change in a forward; weights laid out for `step` that outlive a change of the parameters; a state that
is silently zero. Left to others: episode ends, random streams, devices.

Actors call `eval()` once and run their loop under `torch.inference_mode()`. In training mode `step` lays its weights
out anew at every call.

Axis letters: T steps, n rows (envs), M rows of any kind, L layers, H hidden_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollout_service.errors import OutOfRange, ShapeError, StateMissing
from rollout_service.memory.schema import observation_fields
from rollout_service.policy.distributions import Categorical, Evaluated, distribution_for
from rollout_service.policy.encoders import Encoder, orthogonal_linear
from rollout_service.policy.kernels import UNITS, CategoricalHeads, categorical_heads, takes
from rollout_service.policy.normalizer import RunningMoments, normalize
from rollout_service.policy.recurrent import Core, FeedForwardCore, LSTMCore, StepWeights
from rollout_service.policy.shapes import is_normalized
from rollout_service.policy.spaces import network_input
from rollout_service.runspec import ArraySpec, PolicySpec, Spaces
from rollout_service.runspec import Core as CoreKind

POLICY_GAIN = 0.01
"""Gain of the action head: a fresh policy is nearly uniform."""
VALUE_GAIN = 1.0


@dataclass(frozen=True, slots=True)
class PolicyStep:
    """What one step of the policy gives, one row per env."""

    actions: Tensor
    """[n, *] in the env's own values."""
    log_probs: Tensor
    """float32 [n]"""
    values: Tensor
    """float32 [n]"""
    state: dict[str, Tensor]
    """Name -> float32 [n, L, H], the state that EXITS the step."""


@dataclass(frozen=True, slots=True)
class SequenceEvaluation:
    """What the learner's forward gives. Rows that are not valid hold finite numbers without meaning."""

    log_probs: Tensor
    """float32 [n, T], of the stored actions under the current weights."""
    values: Tensor
    """float32 [n, T]"""
    entropy: Tensor
    """float32 [n, T], nats."""


@dataclass(frozen=True, slots=True)
class NetworkRows:
    """What the encoder reads, prepared as far as no weight is involved. M rows."""

    vectors: Tensor | None
    """float32 [M, size] of all vector leaves side by side, normalised; None without any."""
    images: tuple[Tensor, ...]
    """Image leaves as they came, [M, *shape]: as float32 they would take four times the memory."""

    def take(self, rows: Tensor) -> NetworkRows:
        """Copies of the given rows, int64 [m], in that order."""
        return NetworkRows(
            None if self.vectors is None else self.vectors.index_select(0, rows),
            tuple(image.index_select(0, rows) for image in self.images),
        )


@dataclass(frozen=True, slots=True)
class HeadsEvaluated:
    """Both heads over M rows, and the way back through them."""

    features: Tensor
    """[M, H]"""
    weight: Tensor
    """[parameters + 1, H]: the distribution's parameters, then the value."""
    values: Tensor
    """[M]"""
    chosen: Evaluated

    @property
    def log_probs(self) -> Tensor:
        """[M]"""
        return self.chosen.log_probs

    @property
    def entropy(self) -> Tensor:
        """[M]"""
        return self.chosen.entropy

    @torch.no_grad()
    def gradients(
        self, by_log_prob: Tensor, by_value: Tensor, by_entropy: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Of a loss with these slopes, [M] each: gradient at the features [M, H], and at the head parameters."""
        back = torch.cat([self.chosen.gradient(by_log_prob, by_entropy), by_value.unsqueeze(0)])
        weight, bias = back @ self.features, back.sum(1)
        return back.t() @ self.weight, (weight[:-1], bias[:-1], weight[-1:], bias[-1:])


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The weights as `step` wants them; built from the parameters, never trained."""

    core: StepWeights
    head_weight: Tensor
    """[H, 1 + parameters]: the value, then the distribution's parameters."""
    head_bias: Tensor
    moments: tuple[tuple[Tensor, Tensor] | None, ...]
    """Per observation leaf (offset, scale), or None where nothing is normalised."""


class ActorCritic(nn.Module):
    """An actor-critic over `spaces`, built from `spec`.

    Equal seeds give equal weights; torch's global random state is neither read nor changed.
    Raises SpaceNotSupported for an action space without a distribution.
    """

    def __init__(self, spaces: Spaces, spec: PolicySpec, *, seed: int) -> None:
        super().__init__()
        self.spaces: Final = spaces
        self.spec: Final = spec
        self.distribution: Final[Categorical] = distribution_for(spaces.action)
        self.leaves: Final = tuple(zip(observation_fields(spaces), spaces.observation, strict=True))
        self._image_leaves: Final = tuple(leaf for leaf in spaces.observation if leaf.is_image)
        generator = torch.Generator().manual_seed(seed)
        # Parameters born in inference mode could never be trained, nor tell whether they changed.
        with torch.inference_mode(False):
            self.normalizers = nn.ModuleDict(
                {
                    str(index): RunningMoments(leaf.shape)
                    for index, leaf in enumerate(spaces.observation)
                    if is_normalized(leaf, spec)
                }
            )
            self.encoder = Encoder(spaces.observation, spec.encoder_dim, generator)
            self.core: Core = self._make_core(generator)
            self.policy = orthogonal_linear(spec.hidden_dim, self.distribution.num_parameters, POLICY_GAIN, generator)
            self.value_head = orthogonal_linear(spec.hidden_dim, 1, VALUE_GAIN, generator)
        self._sources: tuple[Tensor, ...] = ()
        self._layout: StepLayout | None = None
        self._layout_stamp = -1

    def _make_core(self, generator: torch.Generator) -> LSTMCore | FeedForwardCore:
        spec = self.spec
        match spec.core:
            case CoreKind.LSTM:
                return LSTMCore(spec.encoder_dim, spec.hidden_dim, spec.num_layers, generator, spec.chrono_max)
            case CoreKind.NONE:
                return FeedForwardCore(spec.encoder_dim, spec.hidden_dim, generator)

    # State

    def state_spec(self) -> dict[str, tuple[int, ...]]:
        """Array name -> shape of one env's recurrent state: hidden and cell, (L, H) each; {} without memory."""
        return self.core.state_spec()

    def initial_state(self, n: int) -> dict[str, Tensor]:
        """The state of n fresh episodes: zeros, name -> float32 [n, L, H]."""
        device = self.value_head.weight.device
        return {name: torch.zeros((n, *shape), device=device) for name, shape in self.state_spec().items()}

    # Acting

    @torch.no_grad()
    def step(
        self, observations: Mapping[str, Tensor], state: Mapping[str, Tensor] | None, noise: Tensor | None = None
    ) -> PolicyStep:
        """Choose one action per env.

        observations: field name -> [n, *shape] in the space's dtype; state: name -> [n, L, H] entering the step;
        noise: [n, *] from `draw_noise`, None for the most probable action. Arguments are not changed and not kept.
        Raises StateMissing where a recurrent policy gets none, ShapeError where its rows do not match.
        """
        heads, exiting = self._forward_step(observations, state)
        actions, log_probs = self.distribution.act(heads[:, 1:], noise)
        return PolicyStep(actions, log_probs, heads[:, 0], exiting)

    @torch.no_grad()
    def value(self, observations: Mapping[str, Tensor], state: Mapping[str, Tensor] | None) -> Tensor:
        """V of observations, float32 [n]; arguments as in `step`. The state that exits is thrown away."""
        return self._forward_step(observations, state)[0][:, 0]

    def draw_noise(self, generator: np.random.Generator, num_steps: int) -> NDArray[np.float32]:
        """Noise of one env for `num_steps` steps, float32 [num_steps, *]; row t goes into `step`."""
        return self.distribution.draw_noise(generator, num_steps)

    def _forward_step(
        self, observations: Mapping[str, Tensor], state: Mapping[str, Tensor] | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Heads [n, 1 + parameters], value first, and the state that exits."""
        if state is None:
            if self.state_spec():
                raise StateMissing(
                    "this policy is recurrent and was called without a state; "
                    "start with initial_state(n) and pass on what each step returns"
                )
            state = {}
        layout = self._step_layout()
        features = self._encode(observations, layout.moments)
        out, exiting = self.core.step(features, state, layout.core)
        return torch.addmm(layout.head_bias, out, layout.head_weight), exiting

    def _step_layout(self) -> StepLayout:
        """The weights for `step`; in eval mode kept until one of them is written or a gradient is asked for."""
        if self.training:
            return self._build_layout()
        if not self._sources:
            self._sources = tuple(self.state_dict(keep_vars=True).values())
        stamp = sum([tensor._version for tensor in self._sources])
        if self._layout is None or stamp != self._layout_stamp:
            self._layout, self._layout_stamp = self._build_layout(), stamp
        return self._layout

    def _build_layout(self) -> StepLayout:
        weight = torch.cat([self.value_head.weight, self.policy.weight]).t().contiguous()
        bias = torch.cat([self.value_head.bias, self.policy.bias])
        return StepLayout(self.core.step_weights(), weight, bias, self._moments())

    def _forget_layout(self) -> None:
        self._sources, self._layout = (), None

    def train(self, mode: bool = True) -> ActorCritic:
        self._forget_layout()
        super().train(mode)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ActorCritic:
        # Moves to another device or dtype replace buffers behind the stamp's back.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._forget_layout()
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A copy counts its writes from zero, so it must not inherit a stamp.
        return {**self.__dict__, "_sources": (), "_layout": None}

    # Training

    def evaluate_sequences(
        self,
        obs_seq: Tensor | Mapping[str, Tensor],
        actions: Tensor,
        episode_starts: Tensor,
        initial_state: Mapping[str, Tensor],
        valid: Tensor,
    ) -> SequenceEvaluation:
        """Log-probs, values and entropy of whole sequences, with gradients.

        obs_seq: [n, T, *] of a lone plain leaf, or field name -> [n, T, *]; actions [n, T, *]; episode_starts [n, T],
        nonzero where the incoming state is zero; initial_state: name -> [L, n, H], entering column 0; valid: bool [n,
        T]. The contents of rows that are not valid reach neither a result nor a gradient, NaN included; the first
        valid row behind such rows must be an episode start, as every rollout has it.
        """
        if torch.is_grad_enabled():
            # An optimiser will follow, and fused ones leave no mark that the stamp could see.
            self._forget_layout()
        observations = {self.leaves[0][0]: obs_seq} if isinstance(obs_seq, Tensor) else obs_seq
        n, num_steps = valid.shape
        if not bool(valid.all()):
            observations = {name: _keep(rows, valid, 0) for name, rows in observations.items()}
            actions = _keep(actions, valid, self.spaces.action.start)
            # A row past the end counts as ended, and a reset in front of it would lengthen the sequence for nothing.
            episode_starts = episode_starts.ne(0) & valid
            episode_starts[:, 0] |= ~valid[:, 0]
        flat = {name: rows.reshape(n * num_steps, *rows.shape[2:]) for name, rows in observations.items()}
        features = self._encode(flat, self._moments())
        out = self.core(features.view(n, num_steps, features.shape[1]), episode_starts, initial_state)
        log_probs, entropy = self.distribution.evaluate(self.policy(out), actions)
        return SequenceEvaluation(log_probs, self.value_head(out)[..., 0], entropy)

    @torch.no_grad()
    def network_rows(self, obs_seq: Tensor | Mapping[str, Tensor], valid: Tensor) -> NetworkRows:
        """Observations as in `evaluate_sequences` -> env-major rows [n * T], of zeros where not valid.

        Good until the statistics change.
        """
        observations = {self.leaves[0][0]: obs_seq} if isinstance(obs_seq, Tensor) else obs_seq
        whole = bool(valid.all())
        vectors: list[Tensor] = []
        images: list[Tensor] = []
        for (name, leaf), moment in zip(self.leaves, self._moments(), strict=True):
            rows = observations[name] if whole else _keep(observations[name], valid, 0)
            rows = rows.reshape(valid.numel(), *rows.shape[2:])
            if leaf.is_image:
                images.append(rows)
                continue
            rows = network_input(leaf, rows)
            vectors.append(rows if moment is None else normalize(rows, *moment))
        return NetworkRows(torch.cat(vectors, dim=1) if vectors else None, tuple(images))

    def padded_features(
        self, rows: NetworkRows, flags: Tensor | None, initial_state: Mapping[str, Tensor], num_steps: int
    ) -> Tensor:
        """What the heads read, with gradients: `evaluate_sequences` up to there, over rows that are laid out already.

        rows: time-major [P * n], see resets.py; flags: float32 [P, n, 1] or None, and initial_state: [L, n, H] per
        name, as `Core.padded` takes them; num_steps: P. Everything finite. Returns [P * n, H], without meaning where
        no real step is. Any thread may call. Whoever trains calls `weights_changed` afterwards.
        """
        images = [network_input(leaf, image) for leaf, image in zip(self._image_leaves, rows.images, strict=True)]
        x: Tensor = self.encoder([] if rows.vectors is None else [rows.vectors], images)
        return self.core.padded(x.view(num_steps, -1, x.shape[1]), flags, initial_state).flatten(0, 1)

    @torch.no_grad()
    def evaluate_heads(self, features: Tensor, actions: Tensor) -> HeadsEvaluated | CategoricalHeads:
        """The rest, without autograd but with the way back. features: [M, H]; actions: [M, *]."""
        policy, value = (self.policy.weight, self.policy.bias), (self.value_head.weight, self.value_head.bias)
        if features.shape[1] % UNITS == 0 and takes(policy[0]):
            return categorical_heads(features, policy, value, actions, self.distribution.start)
        weight, bias = torch.cat([policy[0], value[0]]), torch.cat([policy[1], value[1]])
        # Numbers first, rows last: softmax over a short last axis takes 25 times as long.
        heads = torch.addmm(bias.unsqueeze(1), weight, features.t())
        return HeadsEvaluated(features, weight, heads[-1], self.distribution.evaluate_columns(heads[:-1], actions))

    @property
    def head_parameters(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In the order of `HeadsEvaluated.gradients`; all other parameters come before `features`."""
        return self.policy.weight, self.policy.bias, self.value_head.weight, self.value_head.bias

    def weights_changed(self) -> None:
        """Parameters were written: what `step` has laid out is stale. Fused optimisers leave no mark on them."""
        self._forget_layout()

    def update_normalizer(self, observations: Tensor | Mapping[str, Tensor], valid: Tensor) -> None:
        """Merge the valid rows of a rollout into the statistics; nothing where nothing is normalised.

        observations as in `evaluate_sequences`; valid: bool [n, T]. Only between the last epoch over a rollout and the
        publication of the next weights.
        """
        named = {self.leaves[0][0]: observations} if isinstance(observations, Tensor) else observations
        for index, moments in self._normalized():
            moments.update(named[self.leaves[index][0]][valid.to(torch.bool)])

    def _normalized(self) -> list[tuple[int, RunningMoments]]:
        return [(int(key), module) for key, module in self.normalizers.items() if isinstance(module, RunningMoments)]

    def _moments(self) -> tuple[tuple[Tensor, Tensor] | None, ...]:
        found = {index: moments.offset_and_scale() for index, moments in self._normalized()}
        return tuple(found.get(index) for index in range(len(self.leaves)))

    def _encode(self, observations: Mapping[str, Tensor], moments: tuple[tuple[Tensor, Tensor] | None, ...]) -> Tensor:
        """Rows name -> [M, *shape] to features [M, encoder_dim]."""
        vectors: list[Tensor] = []
        images: list[Tensor] = []
        for (name, leaf), moment in zip(self.leaves, moments, strict=True):
            rows = network_input(leaf, observations[name])
            if moment is not None:
                rows = normalize(rows, *moment)
            (images if leaf.is_image else vectors).append(rows)
        features: Tensor = self.encoder(vectors, images)
        return features

    # Weights across a border

    def parameter_specs(self) -> tuple[ArraySpec, ...]:
        """Every parameter and buffer, in publication order."""
        return tuple(
            ArraySpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self.state_dict().items()
        )

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Copies of all parameters and buffers, on the host."""
        return {name: np.array(tensor.detach().cpu().numpy()) for name, tensor in self.state_dict().items()}

    @torch.no_grad()
    def load_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take over the contents of `arrays`: exactly the names and shapes of `parameter_specs`; nothing is kept.

        Raises OutOfRange for missing or unknown names and ShapeError for a wrong shape, before anything is written.
        """
        own = self.state_dict()
        if own.keys() != arrays.keys():
            missing, unknown = sorted(own.keys() - arrays.keys()), sorted(arrays.keys() - own.keys())
            raise OutOfRange(
                f"missing arrays {missing}, unknown arrays {unknown}; "
                "weights fit only a policy built from the same spaces and settings"
            )
        for name, tensor in own.items():
            if tuple(tensor.shape) != arrays[name].shape:
                raise ShapeError(
                    f"{name} has shape {arrays[name].shape}, this policy has {tuple(tensor.shape)}; "
                    "weights fit only a policy built from the same spaces and settings"
                )
        for name, tensor in own.items():
            tensor.copy_(torch.as_tensor(arrays[name]))
        self._forget_layout()


def _keep(rows: Tensor, valid: Tensor, filler: int) -> Tensor:
    """rows [n, T, *] with `filler` wherever not valid [n, T]; selected, for 0 * NaN is NaN."""
    mask = valid.view(*valid.shape, *(1,) * (rows.dim() - 2))
    return torch.where(mask, rows, filler)  # masked_fill knows no unsigned integers but bytes
