"""How ``make docs`` makes a site of the repository's own pages and notebooks: Sphinx's configuration.

Pages lie where readers of the repository look for them, so the whole repository is the source, and the site begins with
the README. What the README links to under "Where to go next" is the table of contents; a page that is not there fails
the build, as every warning does. The site must be readable without a network: nothing in it may load from elsewhere.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

project = author = "graftlab"
version = release = version_of("graftlab")
root_doc = "README"
extensions = ["myst_nb", "sphinx.ext.autodoc"]
include_patterns = ["*.md", "docs/**.md", "notebooks/*.ipynb"]
exclude_patterns = ["RELEASING.md", "build", "dist", ".*", "venv", "**/node_modules", "**/.ipynb_checkpoints"]

# ---- pages ----------------------------------------------------------------------------------------------------------

myst_enable_extensions = ["html_image"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "graftlab"
html_show_sphinx = html_show_copyright = html_show_sourcelink = False
html_copy_source = False

# ---- the API, from docstrings ---------------------------------------------------------------------------------------

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
# What torch says of its modules' methods would come with theirs.
autodoc_inherit_docstrings = False
add_module_names = False
default_role = "code"
# A reference in a docstring that leads nowhere is an error.
nitpicky = True

# ---- notebooks ------------------------------------------------------------------------------------------------------

# Their kernels, and the ranks of these, inherit both: nothing is fetched, and rows go where `make clean` finds them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["GRAFTLAB_HOME"] = str(ROOT / "build" / "docs-runs")

nb_execution_mode = "cache"
nb_execution_timeout = 600
# What is not installed cannot be executed; that page is shown without outputs.
nb_execution_excludepatterns = [
    page
    for page, package in {"onnx.ipynb": "onnxruntime", "ray.ipynb": "ray"}.items()
    if not importlib.util.find_spec(package)
]
nb_execution_raise_on_error = True
nb_merge_streams = True
# Widgets would load their scripts from elsewhere; what they show as text is shown.
nb_ipywidgets_js: dict[str, dict[str, str]] = {}
nb_mime_priority_overrides = [("*", "application/vnd.jupyter.widget-view+json", None)]


def _digest_of_the_code() -> str:
    """Another text whenever some code of the package is another: then outputs of notebooks are old too."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "graftlab").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


nb_execution_cache_path = str(ROOT / "build" / "docs-notebooks" / _digest_of_the_code())

# ---- what Sphinx calls ----------------------------------------------------------------------------------------------

_LINK = re.compile(r"\[[^]]*\]\(([^)#]+\.(?:md|ipynb))(?:#[^)]*)?\)")
_API = "docs/api/index"
# What a browser loads by itself; a link that waits to be clicked is none of these.
_LOADS = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\bsrc\s*=\s*["']?(?P<src>(?:https?:)?//[^"'\s>]+)"""
    r"""|<link\b(?![^>]*\brel\s*=\s*["']?canonical)[^>]*?\bhref\s*=\s*["']?(?P<href>(?:https?:)?//[^"'\s>]+)"""
    r"""|@import\s+(?:url\()?["']?(?P<imported>(?:https?:)?//[^"')\s]+)"""
    r"""|\burl\(\s*["']?(?P<url>(?:https?:)?//[^"')\s]+)""",
    re.IGNORECASE,
)


def contents(page: str) -> dict[str, list[str]]:
    """The documents that a page of contents leads to, by the caption under which the site lists them."""
    # All links of a page without that heading; those to what lies above it are no part of it.
    section = page.rpartition("## Where to go next")[2]
    names = [link.rpartition(".")[0] for link in _LINK.findall(section) if not link.startswith("..")]
    captions = {"notebooks": "Notebooks", "docs": "Pages"}
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        found.setdefault(captions.get(name.partition("/")[0], "Project"), []).append(name)
    return found


def loaded_from_elsewhere(site: Path) -> list[str]:
    """What pages, styles and scripts of a built site would load over a network."""
    wrong = []
    for path in sorted(site.rglob("*")):
        if path.suffix in (".html", ".css", ".svg"):
            for found in _LOADS.finditer(path.read_text(encoding="utf-8")):
                wrong.append(f"{path.relative_to(site)} loads {found[found.lastgroup or 0]}")
    return wrong


def _add_contents(app: Any, docname: str, source: list[str]) -> None:
    if docname in (root_doc, _API):
        for caption, names in contents(source[0]).items():
            # Those of a page below the front page stand under that page, which has a caption already.
            title = [f":caption: {caption}"] if docname == root_doc else []
            source[0] += "\n".join(["\n\n```{toctree}", ":hidden:", *title, "", *names, "```\n"])


def _find_reference(app: Any, env: Any, node: Any, text: Any) -> Any:
    """References as docstrings have them: by the name in their own module, where pages have the public one.

    In a signature a name that is not public stays text.
    """
    from sphinx import addnodes
    from sphinx.util.nodes import make_refnode

    if node.get("refdomain") != "py":
        return None
    python = env.get_domain("py")
    parts = node["reftarget"].split(".")
    # A method is told by its class too.
    ending = parts[-2:] if len(parts) > 1 and parts[-2][:1].isupper() else parts[-1:]
    found = {
        (entry.docname, entry.node_id): name
        for name, entry in python.objects.items()
        if name.split(".")[-len(ending) :] == ending
    }
    if len(found) == 1:
        ((docname, node_id),) = found
        return make_refnode(app.builder, node["refdoc"], docname, node_id, text, node["reftarget"])
    parent = node.parent
    while parent is not None:
        if isinstance(parent, addnodes.desc_signature):
            return text
        parent = parent.parent
    return None


def _finish(app: Any, error: Exception | None) -> None:
    from sphinx.errors import SphinxError

    if error is not None or app.builder.format != "html":
        return
    site = Path(app.outdir)
    # Beside the README's own page, so that its links fit.
    shutil.copyfile(site / f"{root_doc}.html", site / "index.html")
    if wrong := loaded_from_elsewhere(site):
        raise SphinxError("the site cannot be read offline:\n" + "\n".join(wrong))


def setup(app: Any) -> None:
    from IPython.lib.lexers import IPython3Lexer
    from sphinx.highlighting import lexer_classes, lexers

    # Blocks are cells, in which lines may be magics.
    lexers.pop("python", None)
    lexer_classes["python"] = IPython3Lexer
    app.connect("source-read", _add_contents)
    app.connect("missing-reference", _find_reference)
    app.connect("build-finished", _finish)
