"""The process of a draft's trial has the notebook's surroundings, and sends what the draft made."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from graftlab.base import shipping
from graftlab.grafting.trial import Trial
from graftlab.plan.plan import GraftPlan
from graftlab.ranks import trial_process
from graftlab.ranks.trial_process import _enter, _TrialSpec


@pytest.mark.parametrize("kept", [None, {"pair": 3}])
def test_a_trial_has_the_notebooks_surroundings(kept: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packed = None if kept is None else shipping.pack_result(kept)
    spec = _TrialSpec((), GraftPlan(b2t="True"), packed, "cpu", {"A": "1"}, ["x"], str(tmp_path))
    done: Any = Mock()
    system: Any = SimpleNamespace(devnull="/dev/null", O_RDWR=2, environ={"OLD": "1", "A": "0"})
    system.setsid, system.chdir, system.open, system.dup2 = done.setsid, done.chdir, Mock(return_value=9), done.dup2
    monkeypatch.setattr(trial_process, "os", system)
    monkeypatch.setattr(sys, "path", ["old"])
    monkeypatch.setattr(trial_process, "die_with_notebook", done.die)
    tried = Mock(return_value=Trial(error="none"))
    monkeypatch.setattr(trial_process, "try_draft", tried)
    done.connection.recv_bytes.return_value = pickle.dumps(spec)
    done.connection.fileno.return_value = 5
    _enter(done.connection)
    assert (system.environ, sys.path) == ({"A": "1"}, ["x"])
    done.setsid.assert_called_once_with()
    done.chdir.assert_called_once_with(str(tmp_path))
    assert [each.args for each in done.dup2.call_args_list] == [(9, 0), (9, 1), (9, 2)]
    done.die.assert_called_once_with(5)
    tried.assert_called_once_with((), kept, "cpu", GraftPlan(b2t="True"))
    # Its time begins once it is ready.
    ready, found = (each.args[0] for each in done.connection.send_bytes.call_args_list)
    assert (ready, pickle.loads(found)) == (b"ready", Trial(error="none"))
