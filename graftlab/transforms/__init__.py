"""Transforms: from the tensors a rank received to the tensor that overwrites its own.

A transform is a function of one :class:`GraftTransformInput`. A plan names it as a dotted path, as source text or as a
function (:class:`TransformSpec`). Two are built in: the default, and :func:`align_by_request`.
"""

from __future__ import annotations

from graftlab.transforms.align import align_by_request
from graftlab.transforms.by_layout import by_layout
from graftlab.transforms.default import default_transform
from graftlab.transforms.inputs import SIGNATURE, GraftTransformInput, Outcome, Transform, dtype_name
from graftlab.transforms.running import compare, run_transform, user_traceback
from graftlab.transforms.spec import TransformSpec

__all__ = [
    "SIGNATURE",
    "GraftTransformInput",
    "Outcome",
    "Transform",
    "TransformSpec",
    "align_by_request",
    "by_layout",
    "compare",
    "default_transform",
    "dtype_name",
    "run_transform",
    "user_traceback",
]
