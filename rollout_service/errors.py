"""The exception tree. Each message says what was wrong, the value, the limit and the remedy.

RolloutServiceError
├── ConfigError             a setting is out of range, or two settings contradict each other
├── SpaceNotSupported       an observation or action space that has no class here (yet)
├── EnvFault                the environment raised or returned something a transition cannot hold
├── SegmentError            shared memory
│   ├── SegmentTooLarge     more bytes than /dev/shm or the memory limit has left
│   ├── SegmentNotFound     no such segment is visible from this process
│   ├── SegmentMismatch     not ours, not ready, too small, or of another layout version
│   └── TornSlot            a slot is no longer what its actor committed
├── RolloutBufferError      the rollout buffer was used out of order or with wrong arguments
│   ├── ShapeError          rank, length or dtype
│   ├── OutOfRange          an index or a count outside its bounds
│   ├── IncompleteRollout   a row that should have been written was not, or is not finite
│   └── OutOfOrder          an operation that needs another one first
├── StateMissing            a recurrent policy was called without its state
├── ProtocolError           control plane
│   ├── MessageRejected     malformed, oversized, unknown or of another protocol version
│   │   └── ProtocolVersionDiffers   the last of these
│   └── HandshakeRefused    the two sides run different configurations
├── WaitTimedOut            a deadline passed; says what was waited for and how long
├── CheckpointError         missing, damaged, or of another configuration
├── RatioLawBroken          recomputed log-probs differ from the stored ones before the first update
└── RunFailed               the run stopped before its last step
"""

from typing import Final

USER_ERRORS: Final = (Exception, SystemExit)
"""What code of the user's may raise: an env that calls `sys.exit` has failed, and does not end its process unheard."""


class RolloutServiceError(Exception):
    """Base of every error this project raises on purpose."""


class ConfigError(RolloutServiceError, ValueError):
    """A setting is out of range, or two settings contradict each other."""


class SpaceNotSupported(RolloutServiceError, ValueError):
    """An observation or action space for which no class exists here."""


class EnvFault(RolloutServiceError, RuntimeError):
    """The environment raised, or returned something a transition cannot hold."""


class SegmentError(RolloutServiceError, OSError):
    """Base of the shared-memory errors."""


class SegmentTooLarge(SegmentError):
    """The segment needs more bytes than /dev/shm or the memory limit has left."""


class SegmentNotFound(SegmentError):
    """No segment of that name is visible from this process."""


class SegmentMismatch(SegmentError):
    """The segment is not ours, not ready, too small, or of another layout version."""


class TornSlot(SegmentError):
    """A slot is not what its actor committed: somebody else has written to it."""


class RolloutBufferError(RolloutServiceError, ValueError):
    """Base of the errors of wrong use of a rollout buffer."""


class ShapeError(RolloutBufferError):
    """Wrong rank, length or dtype."""


class OutOfRange(RolloutBufferError, IndexError):
    """An index or a count outside its bounds."""


class IncompleteRollout(RolloutBufferError):
    """A row that should have been written was not, or holds a value that is not finite."""


class OutOfOrder(RolloutBufferError):
    """An operation that needs another one to have run first."""


class StateMissing(RolloutServiceError, ValueError):
    """A recurrent policy was called without its recurrent state."""


class ProtocolError(RolloutServiceError):
    """Base of the control-plane errors."""


class MessageRejected(ProtocolError, ValueError):
    """A message that is malformed, oversized, unknown or of another protocol version."""


class ProtocolVersionDiffers(MessageRejected):
    """A message of a release that speaks another protocol version. Names both."""


class HandshakeRefused(ProtocolError):
    """The two sides of a handshake run different configurations."""


class WaitTimedOut(RolloutServiceError, TimeoutError):
    """A deadline passed. Says what was waited for, and how long."""


class CheckpointError(RolloutServiceError):
    """A checkpoint that is missing, damaged, or of another configuration."""


class RatioLawBroken(RolloutServiceError):
    """Before the first update a recomputed log-prob differs from the stored one."""


class RunFailed(RolloutServiceError):
    """The run stopped before its last step."""
