"""The one part of the build that pyproject.toml has no settled word for: the compiled pass of the learner.

It is optional: where it cannot be compiled the package installs without it, and numpy computes the same
(docs/decisions/0014). One binary serves every CPython from 3.11 on.
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
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
