"""The one part of the build that pyproject.toml has no settled word for: the compiled parts.

They are optional: where they cannot be compiled the package installs without them, and numpy and torch compute the same
(docs/decisions/0014, 0019). One binary of each serves every CPython from 3.11 on.
"""

from __future__ import annotations

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "learner._single_pass",
            ["learner/_single_pass.c"],
            # The same bits as numpy on every processor: no product and sum in one rounding.
            extra_compile_args=["-O3", "-ffp-contract=off"],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "rollout_service.policy._layers",
            ["rollout_service/policy/_layers.c"],
            depends=[f"rollout_service/policy/_{name}.h" for name in ("tiles", "dense_layer", "heads", "lstm_layer")],
            extra_compile_args=["-O3"],
            libraries=["m"],
            py_limited_api=True,
            optional=True,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
