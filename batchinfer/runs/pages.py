"""HTML pages of `report` and `compare`: one file each, with its style sheet in it.

Texts from the bucket may be hostile. Jinja escapes them. The page's content security policy also forbids scripts
and requests, so no script could run even if a text were not escaped.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
from typing import Any

from batchinfer import __version__
from batchinfer.core import units
from batchinfer.core.errors import AlreadyExists, ConfigError, ObjectNotFound
from batchinfer.ledger.jobs import OpenStore, split_name
from batchinfer.runs.samples import cut


def render_template(name: str, **values: Any) -> str:
    """Return a page as HTML: the template `name` of this package's folder templates, with `values`."""
    import jinja2

    files = importlib.resources.files("batchinfer.runs") / "templates"
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(lambda name: (files / name).read_text(encoding="utf-8")),
    )
    environment.globals["f"] = units
    environment.filters["cut"] = cut
    style = (files / "report.css").read_text(encoding="utf-8")
    template = environment.get_template(name)
    return template.render(style=style, policy=_policy(style), version=__version__, **values)


def _policy(style: str) -> str:
    """The page's content security policy: it allows no script, no request, and no style but `style`."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def put_page(url: str, page: str, open_store: OpenStore) -> int:
    """Write a page to a path or URL, and return its size in bytes. An older page there is replaced.

    Raises:
        ConfigError: the URL names no file, or names a folder.
    """
    folder, name = split_name(url)
    if not name or name.startswith("."):
        raise ConfigError(f"--output {url!r}: names no file", hint="add a name: -o report.html")
    store = open_store(folder)
    data = page.encode(errors="replace")
    try:
        store.create(name, data)
    except AlreadyExists:
        try:
            store.replace(name, data, store.stat(name).etag)
        except ObjectNotFound:
            raise ConfigError(
                f"--output {url}: is a folder, expected a file",
                hint=f"name a file in it: -o {url.rstrip('/')}/report.html",
            ) from None
    return len(data)
