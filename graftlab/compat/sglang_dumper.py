"""The calls of SGLang's dumper, as taps.

Use ``from graftlab.compat.sglang_dumper import dumper`` instead of ``from sglang.srt.debug_utils.dumper import
dumper``. With ``GRAFTLAB_COMPAT=sglang`` the latter imports this module too, so that engines and trainers with such
calls join unchanged, with the settings of the ``DUMPER_GRAFTER_*`` variables (:class:`graftlab.GraftConfig`).
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

from graftlab.compat.module_taps import watch_modules
from graftlab.config import GraftConfig
from graftlab.errors import ConfigError, TagError
from graftlab.jobs.attach import attach
from graftlab.taps import calls
from graftlab.taps.watch import Watch
from graftlab.transforms.inputs import GraftTransformInput as GraftTransformInput

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

_GRAFTER = "grafter_"
# The kinds of tensors to tap, with their defaults; the variable is DUMPER_ and the name.
_SHOWN = {"enable_value": True, "enable_grad": False, "enable_model_value": False, "enable_model_grad": False}
# Settings for files and servers that only SGLang's dumper has.
_IGNORED = frozenset(
    {
        *("dir", "enable_output_file", "enable_output_console", "exp_name", "cleanup_previous"),
        *("collective_timeout", "server_port", "source_patcher_config"),
        *("include_parallel_rank_in_filename", "grafter_backend"),
    }
)
_FIELDS = {
    **{f"{_GRAFTER}{name}": name for name in ("enable", "role", "b2t_filter", "t2b_filter", "transform_path")},
    **{f"{_GRAFTER}{name}": name for name in ("baseline_world_size", "target_world_size", "group_name", "timeout")},
    f"{_GRAFTER}master_address": "address",
    f"{_GRAFTER}master_port": "port",
}


class Dumper:
    """The calls of SGLang's dumper. They do nothing on a rank that is neither attached nor recorded."""

    def __init__(self) -> None:
        self._shown = {name: _flag(name, default) for name, default in _SHOWN.items()}
        # SGLang's default is off; here a process that joins or records has its taps unless the variable is 0.
        self._enabled = _flag("enable", True)
        self._filter: str | None = os.environ.get("DUMPER_FILTER") or None
        self._context: dict[str, Any] = {}
        self._settings: dict[str, Any] = {}
        self._watches: list[Watch] = []
        # SGLang's default is "core"; here it is "all", because the plan chooses among taps.
        self._mode = _mode(os.environ.get("DUMPER_NON_INTRUSIVE_MODE") or "all")
        self._step = 0
        if self._filter is not None:
            _refuse_filter()

    # ---- taps ---------------------------------------------------------------------------------------------------

    @property
    def may_enable(self) -> bool:
        """Whether taps are handled here, or would be with ``configure(enable=True)``."""
        return calls.tap_handler() is not None

    def step(self) -> None:
        """End an iteration: see :func:`graftlab.step`. While ``enable`` is off it does nothing, as in SGLang."""
        if self._enabled:
            self._step += 1
            calls.step()

    @property
    def is_on(self) -> bool:
        """Whether values are tapped now."""
        return self._enabled and calls.tap_handler() is not None

    def dump(
        self,
        name: str,
        value: Any,
        save: bool = True,
        dims: str | None = None,
        dims_grad: str | None = None,
        grafter_extras: Any = None,
        **tags: Any,
    ) -> None:
        """Tap a value. ``dims`` is its layout, ``dims_grad`` its gradient's; ``grafter_extras`` are the tap's extras.

        ``save`` is for SGLang's files, and ignored. The gradient is tapped if ``enable_grad`` is set. A number is
        tapped as a tensor without dimensions, so that a graft does not change it.
        """
        if not self.is_on:
            return
        if type(value) in (bool, int, float):
            value = torch.tensor(value, dtype=torch.float64 if type(value) is float else None, device="cpu")
        tags = {**tags, **self._context}
        if self._shown["enable_value"]:
            calls.tap(name, value, extras=grafter_extras, layout=dims, **tags)
        if self._shown["enable_grad"] and isinstance(value, torch.Tensor):
            calls.tap_gradient(name, value, tags, layout=dims_grad or dims)

    @property
    def context(self) -> dict[str, Any]:
        """The tags that every tap has."""
        return self._context

    def show(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Tap a module's tensor; return the tensor with which the model continues."""
        shown = value
        if self._shown["enable_value"]:
            shown = calls.show(name, value, None, replace=True, tags=self._context)
        if self._shown["enable_grad"]:
            calls.tap_gradient(name, shown, self._context)
        return shown

    def dump_model(
        self,
        model: torch.nn.Module,
        name_prefix: str = "param",
        save: bool = True,
        get_grad: Callable[[torch.nn.Parameter], torch.Tensor | None] | None = None,
        step: int | None = None,
        **tags: Any,
    ) -> None:
        """Tap all parameters if ``enable_model_value`` is set, and their gradients if ``enable_model_grad`` is.

        ``get_grad`` returns a parameter's gradient. ``step`` is for SGLang's files, and ignored: a tap belongs to the
        current step.
        """
        if not self.is_on:
            return
        tags = {**tags, **self._context}
        for path, parameter in model.named_parameters():
            name = f"{name_prefix}__{path}"
            if self._shown["enable_model_value"]:
                calls.tap(name, parameter, kind="param", **tags)
            if self._shown["enable_model_grad"]:
                gradient = parameter.grad if get_grad is None else get_grad(parameter)
                if gradient is not None:
                    calls.tap(name, gradient, kind="param_grad", **tags)

    def dump_dict(self, name_prefix: str, data: Any, save: bool = True, **tags: Any) -> None:
        """Tap every value of a dict, or every attribute of an object, as ``prefix_key``."""
        if not self.is_on:
            return
        values = data if isinstance(data, Mapping) else _attributes(data)
        for key, value in values.items():
            self.dump(f"{name_prefix}_{key}", value, save=save, **tags)

    # ---- tags around taps ---------------------------------------------------------------------------------------

    def set_ctx(self, **tags: Any) -> None:
        """Give these tags to every later tap, in all threads; None removes a tag."""
        merged = {**self._context, **tags}
        self._context = {name: value for name, value in merged.items() if value is not None}

    def ctx(self, extractor: Callable[..., dict[str, Any]] | None = None, **tags: Any) -> Callable[[F], F]:
        """Return a decorator that tags every tap within a function, with tags given or made from its first argument."""
        if (extractor is None) == (not tags):
            raise TagError("dumper.ctx takes either a function of the first argument, or tags")

        def decorate(function: F) -> F:
            @functools.wraps(function)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                added = tags if extractor is None else extractor(args[0])
                before = self._context
                self.set_ctx(**added)
                try:
                    return function(*args, **kwargs)
                finally:
                    self._context = before

            return wrapped  # type: ignore[return-value]

        return decorate

    # ---- settings -----------------------------------------------------------------------------------------------

    def configure(self, **settings: Any) -> None:
        """Change settings by SGLang's names. ``grafter_enable=True`` joins with the ``grafter_`` settings.

        Raises :class:`~graftlab.errors.ConfigError` for an unknown setting, or a value that cannot be used.
        """
        for name, value in settings.items():
            if name in self._shown:
                if type(value) is not bool:
                    raise ConfigError(f"{name} (DUMPER_{name.upper()}) is {value!r}; it takes True or False")
                self._shown[name] = value
            elif name == "enable":
                if type(value) is not bool:
                    raise ConfigError(f"enable (DUMPER_ENABLE) is {value!r}; it takes True or False")
                self._enabled = value
            elif name == "non_intrusive_mode":
                self._mode = _mode(value)
            elif name in _FIELDS:
                self._settings[_FIELDS[name]] = value
            elif name == "filter":
                if value is not None:
                    _refuse_filter()
            elif name in _IGNORED:
                logger.info("dumper.configure(%s=...) is ignored: graftlab has no such files or servers", name)
            else:
                known = ", ".join(["enable", "non_intrusive_mode", *self._shown, *_FIELDS])
                raise ConfigError(f"dumper.configure: {name!r} is not a setting; the settings are {known}")
        if settings.get("grafter_enable"):
            attach(GraftConfig.with_defaults(**self._settings))

    def configure_default(self, **settings: Any) -> None:
        """Change the settings that the environment does not give; see :meth:`configure`."""
        self.configure(
            **{name: value for name, value in settings.items() if f"DUMPER_{name.upper()}" not in os.environ}
        )

    def get_state(self) -> dict[str, Any]:
        """Return the settings, without those that graftlab ignores, and the number of steps since the last reset."""
        config = {"enable": self._enabled, "non_intrusive_mode": self._mode, **self._shown, **self._settings}
        return {"config": config, "step": self._step}

    def reset(self) -> None:
        """Remove the tags that were set, and the taps of watched models, and count steps from 0 again.

        The tag ``step`` continues, because the steps of both sides pair by it.
        """
        self._step = 0
        self._context = {}
        for watched in self._watches:
            watched.remove()
        self._watches = []

    def register_non_intrusive_dumper(self, model: torch.nn.Module) -> Watch | None:
        """Tap every module's inputs and outputs while ``enable`` is on, inside a layer with its number as ``layer_id``.

        With ``non_intrusive_mode`` ``"core"`` only the batch's ids, positions and lengths are tapped; with ``"off"``
        nothing is, and the result is None.
        """
        if self._mode == "off":
            return None
        self._watches.append(watch_modules(self, model, core_only=self._mode == "core"))
        return self._watches[-1]

    def apply_source_patches(self) -> None:
        """Do nothing: graftlab patches no source code."""
        if os.environ.get("DUMPER_SOURCE_PATCHER_CONFIG"):
            logger.warning("DUMPER_SOURCE_PATCHER_CONFIG is ignored: graftlab patches no source code")

    @contextmanager
    def capture_output(self) -> Iterator[dict[str, Any]]:
        """Raise ConfigError: rows and kept tensors replace it."""
        raise ConfigError("dumper.capture_output has no counterpart; session.tensors and gl.record keep tensors")
        yield {}


def _flag(name: str, default: bool) -> bool:
    variable = f"DUMPER_{name.upper()}"
    text = os.environ.get(variable, "").strip().lower()
    if text not in ("", "0", "1", "true", "false"):
        raise ConfigError(f"{name} ({variable}) is {text!r}; it takes 1 or 0")
    return default if not text else text in ("1", "true")


def _mode(value: Any) -> str:
    if value not in ("all", "core", "off"):
        raise ConfigError(f"non_intrusive_mode (DUMPER_NON_INTRUSIVE_MODE) is {value!r}; it takes all, core or off")
    return str(value)


def _refuse_filter() -> None:
    raise ConfigError(
        "filter (DUMPER_FILTER) chooses what is dumped to files; graftlab's plan chooses taps: use "
        "GRAFTLAB_COMPARE_FILTER, or session.edit(compare=...)"
    )


def _attributes(data: Any) -> dict[str, Any]:
    """Return the object's readable attributes, without methods."""
    found = {}
    for name in dir(data):
        # Properties may raise anything, and the job must continue.
        with suppress(Exception):
            if not (name.startswith("__") and name.endswith("__")) and not callable(value := getattr(data, name)):
                found[name] = value
    return found


def get_truncated_value(value: Any) -> Any:
    """Return the first elements of a large tensor, for a log; other values unchanged."""
    if isinstance(value, tuple):
        return [get_truncated_value(each) for each in value]
    if not isinstance(value, torch.Tensor) or value.numel() < 200:
        return value
    return value[tuple(slice(0, 5) if size > 50 else slice(None) for size in value.shape)]


def get_tensor_info(x: Any) -> str:
    """Describe a tensor in one line, for a log."""
    if not isinstance(x, torch.Tensor):
        return f"type={type(x)} value={x}"
    numbers = x.detach().float()
    figures = {name: getattr(numbers, name)() if x.numel() else None for name in ("min", "max", "mean")}
    shown = " ".join(f"{name}={value}" for name, value in figures.items())
    ends = f"x_sample_head={numbers.flatten()[:5]} x_sample_tail={numbers.flatten()[-5:]}"
    return (
        f"type={type(x)} shape={x.shape} dtype={x.dtype} device={x.device} stride={x.stride()} "
        f"req_grad={x.requires_grad} {shown} {ends}"
    )


dumper = Dumper()
