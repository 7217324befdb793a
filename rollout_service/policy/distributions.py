"""Action distributions: how head outputs become an action, and what log-prob and entropy an action has.

`Distribution` is the seam for further action spaces: one class, and one line in `distribution_for`. Noise is an
argument: it is drawn beforehand from a stream of the env, so sampling depends neither on arrival order nor on how
envs are split over actors. What must never happen: a second rule for log-probs in the learner; both paths end in
`log_softmax` of the same logits. Left to others: whose generator draws the noise.

Axis letters: T num_steps, M rows, C choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_service.policy.acting import gumbel_noise
from rollout_service.policy.shapes import num_choices
from rollout_service.runspec import Leaf


class Distribution(Protocol):
    """Contract of an action distribution."""

    @property
    def num_parameters(self) -> int:
        """Outputs of the policy head."""
        ...

    def draw_noise(self, generator: np.random.Generator, num_steps: int) -> NDArray[np.float32]:
        """float32 [num_steps, *noise shape] of one env."""
        ...

    def act(self, parameters: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Actions in the env's own values [M, *] and their log-probs [M]; without noise the mode."""
        ...

    def evaluate(self, parameters: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy [...] of actions [..., *] under parameters [..., num_parameters]."""
        ...

    def evaluate_columns(self, parameters: Tensor, actions: Tensor) -> Evaluated:
        """The same of actions [M, *] under parameters [num_parameters, M], without autograd."""
        ...


class Evaluated(Protocol):
    """What a distribution says about actions, without autograd, and the way back."""

    @property
    def log_probs(self) -> Tensor:
        """[M]"""
        ...

    @property
    def entropy(self) -> Tensor:
        """[M]"""
        ...

    def gradient(self, by_log_prob: Tensor, by_entropy: Tensor) -> Tensor:
        """Gradient at the parameters, [num_parameters, M], of a loss with these slopes, [M] each."""
        ...


@dataclass(frozen=True, slots=True)
class CategoricalEvaluated:
    """What follows from logits [C, M]."""

    log_p: Tensor
    """[C, M]"""
    p: Tensor
    """[C, M]"""
    choice: Tensor
    """int64 [1, M]"""
    log_probs: Tensor
    negated_entropy: Tensor

    @property
    def entropy(self) -> Tensor:
        return -self.negated_entropy

    def gradient(self, by_log_prob: Tensor, by_entropy: Tensor) -> Tensor:
        """With H the entropy and a the choice, at logit j:

        d log p_a = [j = a] - p_j,  dH = -p_j (log p_j + H)
        """
        back = torch.addcmul(by_log_prob, self.log_p - self.negated_entropy, by_entropy).mul_(self.p).neg_()
        return back.scatter_add_(0, self.choice, by_log_prob.unsqueeze(0))


class Categorical:
    """Discrete(C, start): logits [..., C]; actions int64 [...] in start .. start + C - 1, as the env counts.

    A sample is argmax(log p + g) with g Gumbel noise (the Gumbel-max trick, Gumbel 1954): one kernel, and the noise
    can be drawn far ahead.
    """

    def __init__(self, num_choices: int, start: int = 0) -> None:
        self.num_choices: Final = num_choices
        self.start: Final = start

    @property
    def num_parameters(self) -> int:
        return self.num_choices

    def draw_noise(self, generator: np.random.Generator, num_steps: int) -> NDArray[np.float32]:
        """Gumbel noise, float32 [num_steps, C]: minus the log of an exponential draw."""
        return gumbel_noise([generator], num_steps, self.num_choices)[:, 0]

    def act(self, parameters: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        log_p = torch.log_softmax(parameters, dim=1)
        choice = (log_p if noise is None else log_p + noise).argmax(dim=1, keepdim=True)
        log_probs = log_p.gather(1, choice).squeeze(1)
        actions = choice.squeeze(1)
        return (actions + self.start if self.start else actions), log_probs

    def sample(self, logits: Tensor, noise: Tensor) -> Tensor:
        """Actions [M] of logits [M, C] and noise [M, C]."""
        return self.act(logits, noise)[0]

    def mode(self, logits: Tensor) -> Tensor:
        """The most probable action [M] of logits [M, C]; the first of several."""
        return self.act(logits, None)[0]

    def evaluate(self, parameters: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        # Choices first: over a short last axis log_softmax takes 25 times as long.
        log_p = torch.log_softmax(parameters.movedim(-1, 0), dim=0)
        choice = (actions - self.start if self.start else actions).unsqueeze(0)
        return log_p.gather(0, choice).squeeze(0), -(log_p.exp() * log_p).sum(0)

    def evaluate_columns(self, parameters: Tensor, actions: Tensor) -> CategoricalEvaluated:
        """`evaluate` with the way back: logits [C, M], actions [M]."""
        log_p = torch.log_softmax(parameters, dim=0)
        choice = (actions - self.start if self.start else actions).unsqueeze(0)
        p = log_p.exp()
        return CategoricalEvaluated(log_p, p, choice, log_p.gather(0, choice)[0], torch.mul(p, log_p).sum(0))

    def log_prob(self, logits: Tensor, actions: Tensor) -> Tensor:
        """Log-probs [...] of actions [...] under logits [..., C]."""
        return self.evaluate(logits, actions)[0]

    def entropy(self, logits: Tensor) -> Tensor:
        """Entropy [...] in nats of logits [..., C]."""
        log_p = torch.log_softmax(logits, dim=-1)
        return -(log_p.exp() * log_p).sum(-1)


def distribution_for(action: Leaf) -> Categorical:
    """The distribution of an action space. Raises SpaceNotSupported where there is none."""
    return Categorical(num_choices(action), action.start)
