"""`python -m rollout_service`: the same as the command `rollout-service`."""

import sys

from rollout_service.cli import main

if __name__ == "__main__":
    sys.exit(main())
