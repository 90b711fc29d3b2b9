"""A job's settings for joining: where they are read from, and which are refused, with field and variable."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.refusals import exactly

import graftlab as gl
from graftlab.base.world import MAX_RANKS
from graftlab.config import GraftConfig, enabled
from graftlab.exchange.keys import derive_keys, new_token, write_token
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.own_place import own_rank
from graftlab.transforms import TransformSpec

COMPLETE: dict[str, Any] = {"role": "target", "run_dir": "/tmp/r", "baseline_world_size": 1, "target_world_size": 2}


def test_each_field_is_read_from_its_environment_variable() -> None:
    config = GraftConfig.from_env(
        {
            "GRAFTLAB_ENABLE": "True",
            "GRAFTLAB_ROLE": "baseline",
            "GRAFTLAB_BASELINE_WORLD_SIZE": " 3 ",
            "GRAFTLAB_TIMEOUT": "1.5",
            "GRAFTLAB_COMPARE_FILTER": "",
            "GRAFTLAB_WATCH": "",
            "UNRELATED": "x",
        }
    )
    assert (config.enable, config.role, config.baseline_world_size, config.timeout) == (True, "baseline", 3, 1.5)
    # A blank filter matches nothing; a blank anything else was not given.
    assert (config.compare_filter, config.watch) == ("", None)


def test_graftlab_variables_win_over_those_of_sglangs_dumper() -> None:
    environ = {"DUMPER_GRAFTER_ROLE": "baseline", "DUMPER_GRAFTER_TIMEOUT": "7", "GRAFTLAB_ROLE": "target"}
    config = GraftConfig.from_env(environ)
    assert (config.role, config.timeout) == ("target", 7.0)


def test_the_environment_wins_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFTLAB_TIMEOUT", "9")
    config = GraftConfig.with_defaults(role="target", timeout=3)
    assert (config.role, config.timeout) == ("target", 9.0)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("ROLE", "trainer", "role (GRAFTLAB_ROLE) is 'trainer'; it takes 'baseline' or 'target'"),
        ("ENABLE", "maybe", "enable (GRAFTLAB_ENABLE) is 'maybe'; it takes 1 or 0"),
        ("TIMEOUT", "soon", "timeout (GRAFTLAB_TIMEOUT) is 'soon'; it takes a number"),
        ("TIMEOUT", "0", "timeout (GRAFTLAB_TIMEOUT) is 0.0; it takes seconds"),
        ("TIMEOUT", "nan", "timeout (GRAFTLAB_TIMEOUT) is nan; it takes seconds"),
        ("TARGET_WORLD_SIZE", "0", "target_world_size (GRAFTLAB_TARGET_WORLD_SIZE) is 0; it takes the number of"),
        (
            "TARGET_WORLD_SIZE",
            "2.5",
            "target_world_size (GRAFTLAB_TARGET_WORLD_SIZE) is '2.5'; it takes a whole",
        ),
        ("PORT", "70000", "port (GRAFTLAB_PORT) is 70000; it takes a number from 1 to 65535"),
        ("B2T_FILTER", "layer = 4", "b2t_filter (GRAFTLAB_B2T_FILTER) is 'layer = 4'; it takes a filter expression"),
        ("WATCH_INSIDE", "(", "watch_inside (GRAFTLAB_WATCH_INSIDE) is '('; it takes a filter expression"),
        ("WATCH_GRADS", "all", "watch_grads (GRAFTLAB_WATCH_GRADS) is 'all'; it takes 1 or 0"),
        ("WATCH", "(", "watch (GRAFTLAB_WATCH) is '('; it takes a filter expression"),
        ("TRANSFORM_PATH", "nodots", "transform_path (GRAFTLAB_TRANSFORM_PATH) is 'nodots'; it takes 'pkg.module"),
        ("MESH", "cp", "mesh (GRAFTLAB_MESH) is 'cp'; it takes sizes by name: 'cp' is not a mesh"),
        ("WITHOUT_SESSION", "die", "without_session (GRAFTLAB_WITHOUT_SESSION) is 'die'; it takes 'keep' or 'nothing'"),
        ("GROUP_NAME", "../x", "group_name (GRAFTLAB_GROUP_NAME) is '../x'; it takes a name"),
        ("TIMEOUTS", "3", "GRAFTLAB_TIMEOUTS is not one of graftlab's variables; did you mean GRAFTLAB_TIMEOUT?"),
    ],
)
def test_an_unusable_value_is_refused_with_its_field_variable_and_valid_values(
    variable: str, text: str, message: str
) -> None:
    with pytest.raises(gl.ConfigError) as caught:
        GraftConfig.from_env({f"GRAFTLAB_{variable}": text})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("missing", ["role", "baseline_world_size", "target_world_size", "run_dir"])
def test_settings_required_for_joining_are_named(missing: str) -> None:
    GraftConfig(**COMPLETE).require_complete()
    with pytest.raises(gl.ConfigError, match="is not given") as caught:
        GraftConfig(**{name: value for name, value in COMPLETE.items() if name != missing}).require_complete()
    assert f"(GRAFTLAB_{missing.upper()})" in str(caught.value)


def test_at_least_one_filter_must_be_able_to_match() -> None:
    with pytest.raises(
        gl.ConfigError,
        match=exactly(
            "no filter can match a tap: b2t_filter (GRAFTLAB_B2T_FILTER), t2b_filter "
            "(GRAFTLAB_T2B_FILTER), compare_filter (GRAFTLAB_COMPARE_FILTER), keep_filter "
            "(GRAFTLAB_KEEP_FILTER) are all blank; compare_filter=True compares every tap"
        ),
    ):
        GraftConfig(**COMPLETE, compare_filter=" ").require_complete()


@pytest.mark.parametrize(
    ("address", "port", "where"),
    [
        ("tcp://10.0.0.7:29500", None, ("10.0.0.7", 29500)),
        ("tcp://127.0.0.1:1", None, ("127.0.0.1", 1)),
        ("node-3.cluster:29500", None, ("node-3.cluster", 29500)),
        ("10.0.0.7", 29501, ("10.0.0.7", 29501)),
        # The address's own port is nearer to it than the setting, and the last one is a port, too.
        ("10.0.0.7:65535", 29501, ("10.0.0.7", 65535)),
        ("tcp://[fe80::1]:7", None, ("fe80::1", 7)),
        ("localhost", 29500, None),
        ("/tmp/x", None, None),
    ],
)
def test_an_address_is_parsed_as_network_endpoint_or_local_folder(
    address: str, port: int | None, where: tuple[str, int] | None
) -> None:
    config = GraftConfig(**COMPLETE, address=address, port=port).require_complete()
    assert config.endpoint == where
    assert config.rendezvous.is_absolute()


@pytest.mark.parametrize(
    "address", ["10.0.0.7", "tcp://10.0.0.7", "tcp://a b:3", "10.0.0.7:99999", "udp://x:1", "tcp:/x:1"]
)
def test_an_address_that_cannot_be_parsed_is_refused(address: str) -> None:
    with pytest.raises(gl.ConfigError, match=r"address \(GRAFTLAB_ADDRESS\) is .* or tcp://HOST:PORT"):
        GraftConfig(**COMPLETE, address=address).require_complete()


def test_both_sides_meet_in_a_folder_that_the_settings_alone_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)

    def meets(**settings: Any) -> Path:
        return GraftConfig(role="target", **settings).rendezvous

    assert meets(run_dir="~/runs/1") == Path("/home/me/runs/1")
    assert meets(run_dir="runs/1") == tmp_path / "runs" / "1"
    assert meets(run_dir="runs/1", address="~/meet") == Path("/home/me/meet")
    assert meets(address="./meet") == tmp_path / "meet"
    own = Path(f"/tmp/graftlab-{os.getuid()}")
    assert meets(address="localhost", port=29500) == own / "graftlab-29500"
    assert meets(address="10.0.0.7:29500", group_name="mine", port=1) == own / "mine-29500"


def test_as_many_ranks_as_a_graft_world_has_may_join() -> None:
    half = MAX_RANKS // 2
    config = GraftConfig(**{**COMPLETE, "baseline_world_size": half, "target_world_size": MAX_RANKS - half})
    assert config.require_complete() is config
    with pytest.raises(gl.ConfigError, match=f"it takes at most {MAX_RANKS} ranks together with the baseline's"):
        config.replace(baseline_world_size=half + 1).require_complete()


@pytest.mark.parametrize(
    ("environment", "joins"),
    [
        ({}, False),
        ({"GRAFTLAB_ENABLE": " No "}, False),
        ({"GRAFTLAB_ENABLE": "OFF"}, False),
        ({"GRAFTLAB_ENABLE": "please"}, True),
        ({"DUMPER_GRAFTER_ENABLE": "1"}, True),
        ({"DUMPER_GRAFTER_ENABLE": "1", "GRAFTLAB_ENABLE": "0"}, False),
        ({"DUMPER_GRAFTER_ENABLE": "0", "GRAFTLAB_ENABLE": "1"}, True),
    ],
)
def test_every_value_but_a_plain_no_asks_a_job_to_join(
    environment: dict[str, str], joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GRAFTLAB_ENABLE", "DUMPER_GRAFTER_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert enabled() == joins


def test_a_variable_of_graftlab_that_is_no_setting_is_not_taken_for_one() -> None:
    known = ("HOME", "COMPAT", "RECORD", "RECORD_FILTER", "REQUEST_IDS", "SKIP_JS")
    assert GraftConfig.from_env({f"GRAFTLAB_{name}": "x" for name in known}) == GraftConfig()
    with pytest.raises(gl.ConfigError, match="did you mean GRAFTLAB_REQUEST_IDS"):
        GraftConfig.from_env({"GRAFTLAB_REQUEST_ID": "x"})


def test_localhost_as_address_requires_a_port() -> None:
    with pytest.raises(
        gl.ConfigError,
        match=exactly(
            "port (GRAFTLAB_PORT) is None; it takes a number that both sides share, because address is 'localhost'"
        ),
    ):
        GraftConfig(**COMPLETE, address="localhost").require_complete()


# ---- the token ------------------------------------------------------------------------------------------------------


def test_a_token_is_never_shown_nor_taken_from_arguments() -> None:
    token = new_token()
    assert token not in repr(GraftConfig(token=token))
    with pytest.raises(
        gl.ConfigError,
        match=exactly(
            "token is not accepted as an argument, which other users can see; set GRAFTLAB_TOKEN, or set "
            "token_file to a file of mode 0600 that has the token"
        ),
    ) as caught:
        GraftConfig.from_kv_pairs([f"token={token}"])
    assert token not in str(caught.value)


def test_a_token_file_must_be_readable_by_its_user_only(tmp_path: Path) -> None:
    path, token = tmp_path / "token", new_token()
    write_token(path, token)
    assert path.stat().st_mode & 0o777 == 0o600
    assert GraftConfig(token_file=str(path)).join_token() == token
    path.chmod(0o640)
    with pytest.raises(gl.ConfigError, match="others can read"):
        GraftConfig(token_file=str(path)).join_token()
    with pytest.raises(gl.ConfigError, match=r"token_file \(GRAFTLAB_TOKEN_FILE\).*cannot be read"):
        GraftConfig(token_file=str(tmp_path / "none")).join_token()


def test_a_token_is_nearer_than_its_file_which_may_lie_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    kept, given = new_token(), new_token()
    write_token(tmp_path / "token", kept)
    assert GraftConfig(token_file="~/token").join_token() == kept
    assert GraftConfig(token_file="~/token", token=given).join_token() == given


def test_a_token_from_a_secret_may_end_with_a_newline() -> None:
    assert GraftConfig(token="t" * 43 + "\n").join_token() == "t" * 43


def test_a_token_that_could_be_guessed_is_refused() -> None:
    with pytest.raises(
        gl.ConfigError,
        match=exactly(
            "token (GRAFTLAB_TOKEN) has 6 characters; use the token that gl.listen prints, or one made by "
            "`graftlab token FILE`"
        ),
    ):
        derive_keys("secret")
    one, other = derive_keys(new_token()), derive_keys(new_token())
    assert not set(one) & set(other)


@pytest.mark.parametrize("ports", ["x", "7-3", "0-9", "1-70000"])
def test_invalid_port_ranges_are_refused(ports: str) -> None:
    with pytest.raises(gl.ConfigError, match=r"ports \(GRAFTLAB_PORTS\)"):
        GraftConfig(**COMPLETE, address="tcp://a:1", ports=ports).require_complete()


@pytest.mark.parametrize("wrong", [{"timeout": "3"}, {"enable": 1}, {"role": 3}, {"port": True}])
def test_the_constructor_checks_types(wrong: dict[str, Any]) -> None:
    with pytest.raises(gl.ConfigError, match=rf"GRAFTLAB_{next(iter(wrong)).upper()}"):
        GraftConfig(**wrong)


def test_key_value_pairs_are_read_and_unknown_names_refused() -> None:
    assert GraftConfig.from_kv_pairs(["timeout=30", "b2t_filter=layer == 3"]).b2t_filter == "layer == 3"
    for wrong in ("timeout", "timeouts=3"):
        with pytest.raises(gl.ConfigError, match="is not a setting"):
            GraftConfig.from_kv_pairs([wrong])
    with pytest.raises(
        gl.ConfigError,
        match=exactly(
            "'timeouts' is not a setting; the settings are enable, role, b2t_filter, t2b_filter, "
            "compare_filter, keep_filter, transform_path, address, port, baseline_world_size, "
            "target_world_size, group_name, timeout, buffer_budget, keep_budget, run_dir, watch, "
            "watch_inside, watch_functions, watch_params, watch_inputs, watch_grads, watch_optimizer, "
            "without_session, token, token_file, ports, first_step, mesh"
        ),
    ):
        GraftConfig().replace(timeouts=3)


@given(st.dictionaries(st.sampled_from(["role", "timeout", "enable", "port", "watch", "keep_filter"]), st.text()))
def test_any_text_is_read_or_refused_with_its_name(settings: dict[str, str]) -> None:
    environ = {f"GRAFTLAB_{name.upper()}": text for name, text in settings.items()}
    try:
        said = ""
        GraftConfig.from_env(environ)
    except gl.ConfigError as error:
        said = str(error)
    assert not said or any(f"({variable})" in said for variable in environ)


@pytest.mark.parametrize(
    ("name", "allowed", "refused", "takes"),
    [
        ("baseline_world_size", (1, MAX_RANKS - 1), (0, MAX_RANKS), "the number of that side's ranks, from 1 to 511"),
        ("target_world_size", (1, MAX_RANKS - 1), (0, MAX_RANKS), "the number of that side's ranks, from 1 to 511"),
        ("timeout", (1e-3, 1e6), (0.0, -1.0, 1e6 + 1), "seconds, more than 0 and at most 1,000,000"),
        ("buffer_budget", (0, 1 << 40), (-1,), "a number of bytes"),
        ("keep_budget", (0, 1 << 40), (-1,), "a number of bytes"),
        ("first_step", (0, 7), (-1,), "the number of steps that this job has already made, 0 or more"),
        ("port", (1, 65535), (0, 65536), "a number from 1 to 65535"),
        ("group_name", ("a", "a.b"), ("", "a/b", ".a"), "a name without a / that does not begin with a dot"),
        ("without_session", ("keep", "nothing"), ("", "die"), "'keep' or 'nothing'"),
    ],
)
def test_the_first_and_last_values_of_a_setting_are_allowed_and_the_next_refused(
    name: str, allowed: tuple[Any, ...], refused: tuple[Any, ...], takes: str
) -> None:
    for value in allowed:
        assert getattr(GraftConfig(**{name: value}), name) == value
    for value in refused:
        said = f"{name} (GRAFTLAB_{name.upper()}) is {value!r}; it takes {takes}"
        with pytest.raises(gl.ConfigError, match=exactly(said)):
            GraftConfig(**{name: value})


@pytest.mark.parametrize(
    ("ports", "range_of"),
    [(None, (0,)), ("1", range(1, 2)), ("5-7", range(5, 8)), ("65535-65535", range(65535, 65536))],
)
def test_the_ports_of_ranks_are_a_range_with_its_ends(ports: str | None, range_of: Sequence[int]) -> None:
    assert GraftConfig(ports=ports).port_range() == range_of


@pytest.mark.parametrize("ports", ["0", "7-5", "5-65536", "a-b", "5-", "-7", "5-7-9"])
def test_ports_that_are_no_range_are_refused(ports: str) -> None:
    said = f"ports (GRAFTLAB_PORTS) is {ports!r}; it takes the first and last port, such as 29600-29699"
    with pytest.raises(gl.ConfigError, match=exactly(said)):
        GraftConfig(ports=ports).port_range()


def test_the_fields_make_the_plan() -> None:
    filters = {name: f"layer == {number}" for number, name in enumerate(("b2t", "t2b", "compare", "keep"))}
    given: dict[str, Any] = {f"{name}_filter": text for name, text in filters.items()}
    assert GraftConfig(**COMPLETE, **given).plan() == GraftPlan(**filters)
    assert GraftConfig(**COMPLETE).plan() == GraftPlan()
    path = "os.path.join"
    made = GraftConfig(**COMPLETE, b2t_filter="True", transform_path=path).plan()
    assert made == GraftPlan(b2t="True", transform=TransformSpec.of(path))


@pytest.mark.parametrize(("rank", "size"), [("-1", "2"), ("first", "2"), ("0", "two"), ("2", "2")])
def test_variables_of_a_launcher_that_name_no_rank_are_refused(
    rank: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(gl.ConfigError, match=f"RANK='{rank}' and WORLD_SIZE='{size}' do not name a rank of a job"):
        own_rank()


def test_one_variable_of_a_launcher_alone_names_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "3")
    assert own_rank()[:2] == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert own_rank()[:2] == (3, 4)


def test_a_mesh_that_cannot_be_is_refused_as_a_setting() -> None:
    config = GraftConfig(role="target", run_dir="/tmp/none", baseline_world_size=1, target_world_size=1)
    with pytest.raises(gl.ConfigError, match="mesh: mesh dimension 'tp' must have a size of at least 1, not 0"):
        gl.attach(config, mesh={"tp": 0})
