"""Environments: from a name to a batch of envs that fills rows. Importing this package alone brings no gymnasium."""
