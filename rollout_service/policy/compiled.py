"""Whether the policy's compiled layers (_layers.c) are there, and can run here. Knows no torch.

They are left out when the package is installed where there is no C compiler, and need a processor with AVX-512. Torch's
operations take their place. Readers: kernels.py, encoder and core, the doctor, the learner's log.
"""

from __future__ import annotations

from typing import Final

try:
    from rollout_service.policy import _layers
except ImportError:
    _layers = None  # type: ignore[assignment]

BUILT: Final = _layers is not None
USABLE: Final = BUILT and _layers.supported()
NOT_BUILT: Final = (
    "sequences go through torch's LSTM: the compiled layers were not built when the package was installed"
)
NOT_SUPPORTED: Final = "sequences go through torch's LSTM: the compiled layers need a processor with AVX-512"
