"""The page at `/`: one file that shows a generation as it comes. It may run its own script and reach its own server, nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from starlette.responses import Response


def load() -> Response:
    """The page with its policy."""
    html = resources.files(__package__).joinpath("page.html").read_text()
    policy = "; ".join(
        (
            "default-src 'none'",
            "connect-src 'self'",
            f"script-src {_hash_of('script', html)}",
            f"style-src {_hash_of('style', html)}",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
    return Response(html, media_type="text/html", headers=headers)


def _hash_of(element: str, html: str) -> str:
    found = re.search(rf"<{element}>(.*?)</{element}>", html, re.DOTALL)
    if found is None:
        raise AssertionError(f"the page has no {element}")
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"
