"""A plugin of pytest: the fixture ``graftlab_compare``, and its options. Nothing else is imported until it is used."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from graftlab.comparison.answers import Comparison


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("graftlab", "comparisons of models by graftlab")
    group.addoption("--graftlab-report", metavar="DIR", help="write a page for each comparison into this folder")
    group.addoption(
        "--graftlab-record",
        action="store_true",
        help="make the recordings that comparisons name anew, and judge nothing",
    )
    group.addoption(
        "--graftlab-record-limit",
        metavar="MIB",
        type=float,
        default=1.0,
        help="the largest size of a recording, in MiB (1); of the largest tensors it then has sketches",
    )


@pytest.fixture
def graftlab_compare(request: pytest.FixtureRequest) -> Iterator[ModelComparer]:
    """Compare two models; the test fails with the verdict's text unless they agree to rounding.

    Its arguments are those of :func:`graftlab.compare`. The baseline may be the folder of a recording, which
    ``--graftlab-record`` makes: of the function that ``reference`` names, or of the target as it is.
    """
    import cloudpickle

    comparer = ModelComparer(
        re.sub(r"[^\w.-]+", "_", request.node.nodeid),
        request.config.getoption("--graftlab-report"),
        bool(request.config.getoption("--graftlab-record")),
        int(request.config.getoption("--graftlab-record-limit") * (1 << 20)),
        request.path.parent,
        request.config.rootpath,
    )
    if request.config.getoption("importmode") == "importlib":
        # The ranks cannot import the test's module by its name.
        cloudpickle.register_pickle_by_value(request.module)
    try:
        yield comparer
    finally:
        comparer.close()


class ModelComparer:
    """Compares models for one test. ``name`` is part of the pages' names, ``folder`` that of the test, ``root`` that of
    all tests; ``limit`` is the largest size of a recording, in bytes.

    Call it as :func:`graftlab.compare`, with ``reference`` besides, the function whose model is recorded.
    """

    def __init__(self, name: str, pages: str | None, records: bool, limit: int, folder: Path, root: Path) -> None:
        self._limit = limit
        self._name, self._records, self._folder, self._root = name, records, folder, root
        self._pages = None if pages is None else Path(pages)
        self._made: list[Comparison] = []

    def __call__(
        self,
        baseline: Callable[[], Any] | str | Path,
        target: Callable[[], Any],
        inputs: Any = None,
        *,
        reference: Callable[[], Any] | None = None,
        **options: Any,
    ) -> Comparison | None:
        """Compare; returns the comparison, or None where the recording was made instead.

        Fails the test unless the answer is ``"agree"``.
        """
        from graftlab.comparison.functions import compare
        from graftlab.errors import RunError

        if isinstance(baseline, (str, Path)):
            baseline = self._recording(Path(baseline))
            if self._records:
                self._record(baseline, reference or target, inputs, options.get("include"))
                return None
            if not baseline.exists():
                pytest.fail(f"{baseline} does not exist; pytest --graftlab-record makes it", pytrace=False)
        __tracebackhide__ = True
        try:
            compared = compare(baseline, target, inputs, **options)
        except RunError as error:
            # Its text has the traceback of the rank; the frames of graftlab would hide the test's own line.
            raise error.with_traceback(None) from None
        self._made.append(compared)
        written = self._write(compared)
        if compared.answer != "agree":
            pytest.fail(f"{compared.answer}:\n{compared.text}{written}", pytrace=False)
        return compared

    def close(self) -> None:
        """End the ranks of all comparisons."""
        for each in self._made:
            each.session.close()

    def _recording(self, path: Path) -> Path:
        """The path of a recording: relative to the root of the tests, or a mere name to the folder of the test."""
        places = [self._root / path, self._folder / path]
        if len(path.parts) == 1:
            places.reverse()
        return next((place for place in places if place.exists()), places[0])

    def _record(self, folder: Path, load: Callable[[], Any], inputs: Any, include: str | None) -> None:
        import shutil

        from graftlab.comparison.functions import record_reference

        made = folder.with_name(f"{folder.name}.{os.getpid()}")
        shutil.rmtree(made, ignore_errors=True)
        try:
            record_reference(load, inputs, made, include=include, limit=self._limit)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
        # Only now, so that a model that fails leaves the old recording.
        shutil.rmtree(folder, ignore_errors=True)
        try:
            made.rename(folder)
        except OSError:
            # Another worker of pytest has made it at this moment.
            shutil.rmtree(made)

    def _write(self, compared: Comparison) -> str:
        if self._pages is None:
            return ""
        self._pages.mkdir(parents=True, exist_ok=True)
        page = self._pages / f"{self._name}{f'-{len(self._made)}' if len(self._made) > 1 else ''}.html"
        return f"\nThe report is {compared.report(page)}"
