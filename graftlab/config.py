"""A job's settings for joining a graft world: from the environment, ``name=value`` pairs, or arguments.

Every error names the field, its environment variable, the value, and the values that it accepts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

from graftlab.base import limits
from graftlab.base.world import MAX_RANKS, Side
from graftlab.errors import ConfigError, FilterError, LayoutError, TransformError
from graftlab.exchange.keys import read_token
from graftlab.filters.expressions import compile_filter
from graftlab.layouts import parse_mesh
from graftlab.plan.plan import GraftPlan
from graftlab.transforms import TransformSpec

PREFIX = "GRAFTLAB_"

# The names of other graft kits for the same settings; graftlab's own take precedence.
_ALIASES = {
    "enable": "DUMPER_GRAFTER_ENABLE",
    "role": "DUMPER_GRAFTER_ROLE",
    "b2t_filter": "DUMPER_GRAFTER_B2T_FILTER",
    "t2b_filter": "DUMPER_GRAFTER_T2B_FILTER",
    "transform_path": "DUMPER_GRAFTER_TRANSFORM_PATH",
    "address": "DUMPER_GRAFTER_MASTER_ADDRESS",
    "port": "DUMPER_GRAFTER_MASTER_PORT",
    "baseline_world_size": "DUMPER_GRAFTER_BASELINE_WORLD_SIZE",
    "target_world_size": "DUMPER_GRAFTER_TARGET_WORLD_SIZE",
    "group_name": "DUMPER_GRAFTER_GROUP_NAME",
    "timeout": "DUMPER_GRAFTER_TIMEOUT",
}
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_TCP = "tcp://"
_HOST_AND_PORT = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[\w.-]+))(?::(?P<port>\d{1,5}))?")
_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off", ""})
_FILTERS = ("b2t_filter", "t2b_filter", "compare_filter", "keep_filter")


class Endpoint(NamedTuple):
    """The address at which a session listens for other machines; port 0 lets the system choose."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, port: int | None = None) -> Endpoint | None:
        """Parse ``tcp://HOST:PORT``, ``HOST:PORT`` or ``HOST``; return None for any other text."""
        found = _HOST_AND_PORT.fullmatch(text.removeprefix(_TCP))
        if found is None or int(found["port"] or 0) > 65535:
            return None
        return cls(found["v6"] or found["host"], int(found["port"] or port or 0))

    def __str__(self) -> str:
        return f"{_TCP}[{self.host}]:{self.port}" if ":" in self.host else f"{_TCP}{self.host}:{self.port}"


@dataclass(frozen=True)
class GraftConfig:
    """How this process joins a graft world. The environment variable of a field is ``GRAFTLAB_`` and its name.

    ``role`` is ``"baseline"`` or ``"target"``. The four filters and ``transform_path`` (``"pkg.module.function"``) are
    the initial plan. A notebook that listens uses its own plan instead.

    Both sides meet at ``address``: a folder, or ``"localhost"`` with a ``port``, which names a folder of this user that
    both sides derive from the port. Without an address they meet in ``run_dir``, where rows are written.
    ``group_name`` separates sessions at one address. ``timeout``, in seconds, bounds the wait for the other ranks; a
    tap waits at most half as long.

    ``first_step`` is for a job that resumes from a checkpoint: the number of steps that it has already made, so that
    its next step pairs with the same step of the other side. Without it both sides' next steps pair.

    ``watch`` taps the modules of the first model that is called, chosen as by ``include`` of :func:`graftlab.watch`;
    each call of that model is then a step. ``watch_inside``, ``watch_functions`` (names, with commas in between),
    ``watch_params``, ``watch_inputs`` and ``watch_grads`` are further arguments of that watch, and with
    ``watch_optimizer`` each optimizer of the model's weights is watched as by :func:`graftlab.watch_training`. Any of
    them is enough to watch the model; ``watch`` is then ``"True"`` by default.

    ``without_session`` says what a job does when its session ends: ``"keep"`` comparing by the plan, or compare
    ``"nothing"``, until another notebook listens at that address.

    ``mesh`` is how this side's ranks are arranged, for layouts that name several axes: sizes by name, outermost first,
    as in ``"cp=2,tp=4"``. Megatron's, SGLang's, vLLM's and a ``DeviceMesh``'s groups are found without it.

    Raises :class:`ConfigError` for a value of the wrong type, or one that cannot be used.

    >>> config = gl.GraftConfig(role="target", run_dir="/tmp/runs/1", baseline_world_size=1, target_world_size=2)
    >>> config.replace(b2t_filter="layer < 4").plan().b2t
    'layer < 4'
    """

    enable: bool = False
    role: str | None = None
    b2t_filter: str | None = None
    t2b_filter: str | None = None
    compare_filter: str | None = "True"
    keep_filter: str | None = None
    transform_path: str | None = None
    address: str | None = None
    port: int | None = None
    baseline_world_size: int | None = None
    target_world_size: int | None = None
    group_name: str = "graftlab"
    timeout: float = limits.TIMEOUT
    buffer_budget: int = limits.BUFFER_BUDGET
    keep_budget: int = limits.KEEP_BUDGET
    run_dir: str | None = None
    watch: str | None = None
    watch_inside: str | None = None
    watch_functions: str | None = None
    watch_params: bool = False
    watch_inputs: bool = False
    watch_grads: bool = False
    watch_optimizer: bool = False
    without_session: str = "keep"
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    ports: str | None = None
    first_step: int | None = None
    mesh: str | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            kind = _KINDS[each.name]
            value = getattr(self, each.name)
            if isinstance(value, os.PathLike):
                value = os.fspath(value)
                object.__setattr__(self, each.name, value)
            if kind is float and type(value) is int:
                value = float(value)
                object.__setattr__(self, each.name, value)
            if (value is None and each.default is None) or type(value) is kind:
                continue
            if value is None and each.name in _FILTERS:
                continue
            raise _refusal(each.name, value, _TAKES[kind])
        self._check_values()

    def _check_values(self) -> None:
        if self.role is not None and self.role not in get_args(Side):
            raise _refusal("role", self.role, "'baseline' or 'target'")
        if self.without_session not in ("keep", "nothing"):
            raise _refusal("without_session", self.without_session, "'keep' or 'nothing'")
        for name in ("baseline_world_size", "target_world_size"):
            size = getattr(self, name)
            if size is not None and not 0 < size < MAX_RANKS:
                raise _refusal(name, size, f"the number of that side's ranks, from 1 to {MAX_RANKS - 1}")
        if not 0 < self.timeout <= 1e6:
            raise _refusal("timeout", self.timeout, "seconds, more than 0 and at most 1,000,000")
        for name in ("buffer_budget", "keep_budget"):
            if getattr(self, name) < 0:
                raise _refusal(name, getattr(self, name), "a number of bytes")
        if self.first_step is not None and self.first_step < 0:
            raise _refusal(
                "first_step", self.first_step, "the number of steps that this job has already made, 0 or more"
            )
        if self.port is not None and not 0 < self.port < 65536:
            raise _refusal("port", self.port, "a number from 1 to 65535")
        if not self.group_name or "/" in self.group_name or self.group_name.startswith("."):
            raise _refusal("group_name", self.group_name, "a name without a / that does not begin with a dot")
        if self.mesh is not None:
            try:
                parse_mesh(self.mesh)
            except LayoutError as error:
                raise _refusal("mesh", self.mesh, f"sizes by name: {error}") from error
        for name in (*_FILTERS, "watch", "watch_inside"):
            try:
                compile_filter(getattr(self, name))
            except FilterError as error:
                raise _refusal(name, getattr(self, name), f"a filter expression: {error}") from error
        if self.transform_path is not None:
            try:
                TransformSpec.of(self.transform_path)
            except TransformError as error:
                raise _refusal("transform_path", self.transform_path, f"'pkg.module.function': {error}") from error

    # ---- reading ------------------------------------------------------------------------------------------------

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> GraftConfig:
        """Read the environment: ``GRAFTLAB_<FIELD>``, or else SGLang's ``DUMPER_GRAFTER_*``.

        Raises :class:`ConfigError` for a value that cannot be read, and for a ``GRAFTLAB_`` variable that looks like a
        misspelled setting.

        >>> gl.GraftConfig.from_env({"GRAFTLAB_ROLE": "target", "GRAFTLAB_TIMEOUT": "30"}).timeout
        30.0
        """
        return cls(**_from_env(os.environ if environ is None else environ))

    @classmethod
    def from_kv_pairs(cls, pairs: Sequence[str]) -> GraftConfig:
        """Read a list of settings such as ``["role=target", "timeout=30"]``.

        >>> gl.GraftConfig.from_kv_pairs(["role=target", "b2t_filter=layer == 3"]).b2t_filter
        'layer == 3'
        """
        found = {}
        for pair in pairs:
            name, equals, text = pair.partition("=")
            if name == "token":
                raise ConfigError(
                    "token is not accepted as an argument, which other users can see; set GRAFTLAB_TOKEN, or set "
                    "token_file to a file of mode 0600 that has the token"
                )
            if not equals or name not in _KINDS:
                raise ConfigError(
                    f"{pair!r} is not a setting; write name=value with one of the names {', '.join(_KINDS)}"
                )
            found[name] = _read(name, text, name)
        return cls(**found)

    @classmethod
    def with_defaults(cls, **defaults: Any) -> GraftConfig:
        """Read the environment; these values apply to the settings that it lacks.

        >>> gl.GraftConfig.with_defaults(role="target", timeout=30).role
        'target'
        """
        _require_known(defaults)
        return cls(**{**defaults, **_from_env(os.environ)})

    def replace(self, **changes: Any) -> GraftConfig:
        """Return a copy with these settings changed.

        >>> gl.GraftConfig().replace(timeout=5).timeout
        5.0
        """
        _require_known(changes)
        return replace(self, **changes)

    # ---- using --------------------------------------------------------------------------------------------------

    def require_complete(self) -> GraftConfig:
        """Return self if it has every setting that joining needs. Raises :class:`ConfigError` that names a missing one.

        >>> gl.GraftConfig(role="target", run_dir="/tmp/r").require_complete()
        Traceback (most recent call last):
        graftlab.errors.ConfigError: baseline_world_size (GRAFTLAB_BASELINE_WORLD_SIZE) is not given...
        """
        needed = {
            "role": "'baseline' or 'target'",
            "baseline_world_size": "the number of the baseline's ranks",
            "target_world_size": "the number of the target's ranks",
        }
        for name, takes in needed.items():
            if getattr(self, name) is None:
                raise ConfigError(f"{name} ({PREFIX}{name.upper()}) is not given; it takes {takes}")
        if self.baseline_world_size + self.target_world_size > MAX_RANKS:  # type: ignore[operator]
            raise _refusal(
                "target_world_size", self.target_world_size, f"at most {MAX_RANKS} ranks together with the baseline's"
            )
        if not any((getattr(self, name) or "").strip() for name in _FILTERS):
            named = ", ".join(f"{name} ({PREFIX}{name.upper()})" for name in _FILTERS)
            raise ConfigError(
                f"no filter can match a tap: {named} are all blank; compare_filter=True compares every tap"
            )
        _ = self.rendezvous
        if self.endpoint is not None:
            self.port_range()
        return self

    @property
    def rendezvous(self) -> Path:
        """The folder in which the processes of both sides meet on this machine.

        Raises :class:`ConfigError` when neither address nor run_dir names one.
        """
        if self.address is None:
            if self.run_dir is None:
                raise ConfigError(
                    f"address ({PREFIX}ADDRESS) is not given, and neither is run_dir ({PREFIX}RUN_DIR); set one "
                    f"to the folder in which both sides meet"
                )
            return Path(self.run_dir).expanduser().absolute()
        port = self.port
        if (endpoint := self.endpoint) is not None:
            port = endpoint.port
        elif self.address not in _LOOPBACK:
            return Path(self.address).expanduser().absolute()
        elif port is None:
            raise _refusal("port", None, f"a number that both sides share, because address is {self.address!r}")
        # A system-wide name, so that both sides can derive it from the port alone.
        return Path("/tmp") / f"graftlab-{os.getuid()}" / f"{self.group_name}-{port}"

    @property
    def endpoint(self) -> Endpoint | None:
        """The address at which jobs of several machines meet; None where both sides are on this machine.

        Raises :class:`ConfigError` for an address that is neither a folder nor has a port.
        """
        address = self.address
        is_folder = address is not None and os.sep in address and "://" not in address
        # A network address with a single slash would be a folder in which no other process waits.
        if address is None or address in _LOOPBACK or (is_folder and not address.startswith("tcp:")):
            return None
        found = Endpoint.parse(address, self.port)
        if found is None or not found.port:
            raise _refusal(
                "address",
                address,
                f"a folder, with a / in it, 'localhost' and a port ({PREFIX}PORT), or tcp://HOST:PORT",
            )
        return found

    @property
    def watches(self) -> bool:
        """Whether the first model that is called is watched."""
        return any(getattr(self, each.name) for each in fields(self) if each.name.startswith("watch"))

    def join_token(self) -> str | None:
        """Return the session's token. Raises :class:`ConfigError` for a token file that other users can read."""
        if self.token is None and self.token_file is not None:
            return read_token(Path(self.token_file).expanduser())
        # A scheduler's secret may be the text of a file, which ends with a newline.
        return None if self.token is None else self.token.strip()

    def port_range(self) -> Sequence[int]:
        """Return the ports at which this rank may listen; 0 lets the system choose."""
        if self.ports is None:
            return (0,)
        first, dash, last = self.ports.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 65536):
            raise _refusal("ports", self.ports, "the first and last port, such as 29600-29699")
        return range(int(first), int(last) + 1)

    @property
    def side(self) -> Side:
        """The role. Raises :class:`ConfigError` when it is not given."""
        if self.role is None:
            raise ConfigError(f"role ({PREFIX}ROLE) is not given; it takes 'baseline' or 'target'")
        return cast(Side, self.role)

    def world_size(self, side: Side) -> int:
        """Return the number of this side's ranks; 0 when it is not given."""
        size: int | None = getattr(self, f"{side}_world_size")
        return size or 0

    def plan(self) -> GraftPlan:
        """Return the plan with these filters and this transform."""
        return GraftPlan(
            b2t=self.b2t_filter,
            t2b=self.t2b_filter,
            compare=self.compare_filter,
            keep=self.keep_filter,
            transform=None if self.transform_path is None else TransformSpec.of(self.transform_path),
        )


_KINDS: dict[str, type] = {
    "enable": bool,
    **dict.fromkeys(("watch_params", "watch_inputs", "watch_grads", "watch_optimizer"), bool),
    "port": int,
    "baseline_world_size": int,
    "target_world_size": int,
    "timeout": float,
    "buffer_budget": int,
    "keep_budget": int,
    "first_step": int,
}
_KINDS = {each.name: _KINDS.get(each.name, str) for each in fields(GraftConfig)}
_TAKES = {bool: "1 or 0", int: "a whole number", float: "a number", str: "text"}
# Variables of graftlab that are not settings of a job.
OTHER_VARIABLES = frozenset({"HOME", "COMPAT", "RECORD", "RECORD_FILTER", "REQUEST_IDS", "SKIP_JS"})


def enabled() -> bool:
    """Whether the environment asks the job to join automatically. Every value but a plain no counts as yes here."""
    text = os.environ.get(f"{PREFIX}ENABLE", os.environ.get(_ALIASES["enable"], ""))
    return text.strip().lower() not in _FALSE


def _from_env(environ: Mapping[str, str]) -> dict[str, Any]:
    known = {f"{PREFIX}{name.upper()}" for name in _KINDS} | {PREFIX + name for name in OTHER_VARIABLES}
    for variable in environ:
        if variable.startswith(PREFIX) and variable not in known and (meant := _closest(variable, known)):
            raise ConfigError(
                f"{variable} is not one of graftlab's variables; did you mean {meant}? The variables are "
                f"{', '.join(sorted(known))}"
            )
    found = {}
    for name in _KINDS:
        for variable in (f"{PREFIX}{name.upper()}", _ALIASES.get(name, "")):
            if variable in environ:
                found[name] = _read(name, environ[variable], variable)
                break
    return found


def _closest(variable: str, known: set[str]) -> str | None:
    import difflib

    return next(iter(difflib.get_close_matches(variable, known, n=1, cutoff=0.85)), None)


def _read(name: str, text: str, source: str) -> Any:
    kind = _KINDS[name]
    if kind is str:
        # A blank filter matches nothing; any other blank value counts as not given.
        return text if text or name in _FILTERS else (GraftConfig.__dataclass_fields__[name].default)
    text = text.strip()
    if kind is bool:
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
    else:
        try:
            return kind(text)
        except ValueError:
            pass  # raised below, as for every kind
    raise _refusal(name, text, _TAKES[kind], source)


def _refusal(name: str, value: object, takes: str, source: str = "") -> ConfigError:
    variable = source or f"{PREFIX}{name.upper()}"
    shown = name if variable == name else f"{name} ({variable})"
    return ConfigError(f"{shown} is {value!r}; it takes {takes}")


def _require_known(given: Mapping[str, object]) -> None:
    unknown = given.keys() - _KINDS.keys()
    if unknown:
        raise ConfigError(f"{min(unknown)!r} is not a setting; the settings are {', '.join(_KINDS)}")
