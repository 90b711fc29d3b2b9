"""A step that is made once in a process is recorded in a file and compared with in the next process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import GraftPlan

import graftlab as gl
