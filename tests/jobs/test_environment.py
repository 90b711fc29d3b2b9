"""The variables that a session gives to a launcher are those with which a job joins it."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.refusals import exactly

import graftlab as gl
from graftlab.config import GraftConfig
from graftlab.exchange.keys import read_token


def config_of(session: gl.Session, patch: pytest.MonkeyPatch) -> GraftConfig:
    for name, text in session.environment("target").items():
        patch.setenv(name, text)
    return GraftConfig.from_env()


def test_the_environment_determines_all_settings_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gl.listen(1, 3, folder=tmp_path) as session:
        config = config_of(session, monkeypatch)
        assert (config.role, config.baseline_world_size, config.target_world_size) == ("target", 1, 3)
        assert config.rendezvous == tmp_path
        assert not any("TOKEN" in name for name in session.environment("baseline"))


def test_the_token_is_named_by_its_file_and_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gl.listen(1, 3, folder=tmp_path, address="tcp://127.0.0.1:0") as session:
        config = config_of(session, monkeypatch)
        token = config.join_token()
        assert token == read_token(Path(session.environment("target")["GRAFTLAB_TOKEN_FILE"]))
        assert token not in "".join(session.environment("target").values())
        assert config.endpoint is not None
        assert config.endpoint.port > 0


def test_a_session_without_jobs_and_an_unknown_side_are_refused(tmp_path: Path) -> None:
    with (
        gl.listen(folder=tmp_path) as session,
        pytest.raises(gl.SessionError, match=exactly("session.environment('both'): a side is 'baseline' or 'target'")),
    ):
        session.environment("both")  # type: ignore[arg-type]
