"""The epochs of one update: minibatches of whole env rows, clipped PPO, one optimiser step each.

    batch laid out -> shuffled minibatches -> blocks on threads: forward, slopes, gradient
                                           -> gradients added in order -> clip -> Adam     epochs x minibatches times

Writer and reader: the trainer. Writes the policy's parameters and the optimiser's moments, nothing else. What must
never happen: a stop in the middle of a minibatch; a result that depends on the number of threads. Left to others: what
a stopped update is rolled back to, advantages, statistics, checkpoints' files.

Axis letters: T steps, n envs of a minibatch, N envs of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.blocks import Block, PaddedBatch, Rows, num_blocks, parts
from learner.crew import Crew, one_thread
from learner.figures import Terms, mean_figures, mean_kl
from learner.optimizer import FlatAdam
from learner.ppo import PpoSettings, ppo_slopes
from learner.sequences import Generator, SequenceBatch, permutation
from learner.staging import thread_count
from rollout_service.config import TrainConfig
from rollout_service.errors import RunFailed
from rollout_service.policy.actor_critic import ActorCritic, SequenceEvaluation

KL_MARGIN: Final = 1.5
"""An update stops once the approximate KL of a minibatch exceeds this times target_kl."""


class Outcome(Enum):
    """How an update ended."""

    COMPLETE = "complete"
    STOPPED_BY_KL = "stopped_by_kl"
    SKIPPED = "skipped"
    """Not one valid row: weights are as before."""
    ABANDONED = "abandoned"
    """`should_stop` said so: the trainer is as before the update."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one block gives."""

    gradients: tuple[Tensor, ...]
    terms: Terms


class Epochs:
    """The optimiser over a policy's parameters, and the loops that feed it."""

    def __init__(self, policy: ActorCritic, config: TrainConfig) -> None:
        """policy: on its device already; its parameters become views of the optimiser's vector."""
        self.policy = policy
        self.config = config
        self._optimizer = FlatAdam(list(policy.named_parameters()), epsilon=config.adam_epsilon)
        self._body = self._optimizer.parameters[: -len(policy.head_parameters)]
        self._settings = PpoSettings.from_config(config)

    def run(
        self,
        batch: SequenceBatch,
        *,
        learning_rate: float,
        shuffle: Generator,
        should_stop: Callable[[], bool] | None = None,
        checked: Tensor | None = None,
    ) -> tuple[Outcome, dict[str, float]]:
        """Clipped PPO over whole env rows. Returns how it ended and the figures' means over the rows that were used.

        checked: bool [N], the rows whose ratio is 1 before the first step by law; None for all. `ratio_deviation` is
        over those of the first minibatch.
        Raises RunFailed if a gradient is not finite.
        """
        padded = PaddedBatch(batch, self.policy, self._settings)
        limit = math.inf if self.config.target_kl is None else KL_MARGIN * self.config.target_kl
        outcome = Outcome.COMPLETE
        seen: list[Terms] = []
        counts: list[int] = []
        norms: list[Tensor] = []
        first_deviation = 0.0
        blocks_at_most = padded.num_blocks(min(self.config.envs_per_minibatch, len(batch)))
        with one_thread(), Crew(thread_count(self.config, blocks_at_most)) as crew:
            for rows in self._passes(len(batch), shuffle):
                if should_stop is not None and should_stop():
                    return Outcome.ABANDONED, {}
                count = int(padded.counts[rows].sum())
                blocks = padded.split(rows)
                terms = self._minibatch(crew, padded, blocks)
                if not seen:
                    first_deviation = _largest_deviation(terms, blocks, checked)
                seen += terms
                counts.append(count)
                if math.isfinite(limit) and mean_kl(terms, count) > limit:
                    outcome = Outcome.STOPPED_BY_KL
                    break
                norms.append(
                    self._optimizer.step(
                        rows=max(count, 1), learning_rate=learning_rate, max_norm=self.config.max_grad_norm
                    )
                )
        self.policy.weights_changed()
        figures = mean_figures(seen, sum(counts), self._settings)
        figures["grad_norm"] = _mean_norm(norms, counts)
        if not math.isfinite(figures["grad_norm"]):
            raise RunFailed(
                f"the gradient norm of the update is {figures['grad_norm']}: the weights are not finite any more and "
                "were not handed out; lower learning_rate, or scale rewards (reward_scale, normalize_returns)"
            )
        return outcome, {**figures, "ratio_deviation": first_deviation, "optimizer_steps": float(len(norms))}

    def _passes(self, rows: int, shuffle: Generator) -> Iterator[Rows]:
        """Every row once per epoch, in minibatches."""
        for _ in range(self.config.epochs):
            order = permutation(rows, shuffle).numpy()
            yield from parts(order, self.config.envs_per_minibatch)

    def _minibatch(self, crew: Crew, padded: PaddedBatch, blocks: list[Rows]) -> list[Terms]:
        """Leaves the gradient of the rows' summed objective with the optimiser. Returns the blocks' terms."""
        terms: list[Terms] = []

        def compute(block: int) -> _Part:
            return self._block(padded.take(blocks[block]))

        def take(block: int, part: _Part) -> None:
            self._optimizer.take(part.gradients, first=block == 0)
            terms.append(part.terms)

        crew.run(len(blocks), compute, take)
        return terms

    def _block(self, block: Block) -> _Part:
        """Any thread; reads the parameters and writes nothing."""
        with torch.enable_grad():
            features = self.policy.padded_features(block.inputs, block.flags, block.initial_state, block.num_steps)
        heads = self.policy.evaluate_heads(features, block.actions)
        slopes = ppo_slopes(heads, block, self._settings)
        back, head_gradients = heads.gradients(slopes.by_log_prob, slopes.by_value, slopes.by_entropy)
        gradients = torch.autograd.grad(features, self._body, back)
        return _Part((*gradients, *head_gradients), Terms.of(heads, slopes, block))

    @torch.no_grad()
    def evaluate(self, minibatch: SequenceBatch) -> SequenceEvaluation:
        """The current policy's view of a minibatch, without gradients."""
        count = num_blocks(len(minibatch)) if minibatch.valid.device.type == "cpu" else 1
        if count <= 1:
            return self._view(minibatch)
        blocks = [minibatch.take(rows) for rows in torch.arange(len(minibatch)).tensor_split(count)]
        views: list[SequenceEvaluation] = []
        with one_thread(), Crew(thread_count(self.config, count)) as crew:
            crew.run(count, lambda block: self._view(blocks[block]), lambda _, view: views.append(view))
        return SequenceEvaluation(
            torch.cat([view.log_probs for view in views]),
            torch.cat([view.values for view in views]),
            torch.cat([view.entropy for view in views]),
        )

    @torch.no_grad()  # of this thread
    def _view(self, rows: SequenceBatch) -> SequenceEvaluation:
        return self.policy.evaluate_sequences(
            rows.obs_seq, rows.actions, rows.episode_starts, rows.initial_state, rows.valid
        )

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Copies of the optimiser's state: adam/step/<parameter>, adam/exp_avg/..., adam/exp_avg_sq/..."""
        return {f"adam/{name}": array for name, array in self._optimizer.to_arrays().items()}

    def load_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """The reverse of `to_arrays`; other names are not looked at. Shapes are the caller's to check."""
        self._optimizer.load_arrays(
            {name.removeprefix("adam/"): array for name, array in arrays.items() if name.startswith("adam/")}
        )


def _mean_norm(norms: list[Tensor], counts: list[int]) -> float:
    """Mean over the steps of the norm of the mean gradient. norms: of the rows' sum; counts: rows of each minibatch."""
    if not norms:
        return 0.0
    rows = torch.tensor(counts[: len(norms)], dtype=torch.float64).clamp_(min=1.0)
    return float((torch.stack(norms).double().cpu() / rows).mean())


def deviations(evaluation: SequenceEvaluation, minibatch: SequenceBatch) -> Tensor:
    """|ratio - 1| of every row [n, T]; 0 where a row is not valid, inf where the ratio is not a number."""
    with torch.no_grad():
        deviation = (torch.exp(evaluation.log_probs - minibatch.old_log_probs) - 1.0).abs()
        return torch.where(minibatch.valid, deviation.nan_to_num(nan=math.inf), 0.0)


def _largest_deviation(terms: list[Terms], blocks: list[Rows], checked: Tensor | None) -> float:
    """Largest |ratio - 1| over a minibatch's checked rows; inf if a ratio is not a number."""
    largest = 0.0
    for term, rows in zip(terms, blocks, strict=True):
        deviation = torch.expm1(term.log_ratios()).abs().nan_to_num(nan=math.inf).view(-1, len(rows)).amax(0)
        if checked is not None:
            deviation = torch.where(checked[torch.from_numpy(rows).to(checked.device)], deviation, 0.0)
        largest = max(largest, float(deviation.max()))
    return largest
