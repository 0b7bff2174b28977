"""A hook of Hatchling: what a package index shows of the project, with links that lead somewhere there.

The repository does not know its own address. Whoever builds a release says it: `PROJECT_HOME=... make wheel`,
as the release workflow does. Then the metadata have project URLs, and the README's links to files lead to
that repository. Without it there are no URLs, and those links become plain text.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: A link to a file of the repository: neither an address nor a heading of the same page.
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")


def project_urls(home: str) -> dict[str, str]:
    """The project URLs of a repository at this address; none without one."""
    if not home:
        return {}
    return {
        "Repository": home,
        "Documentation": f"{home}/blob/main/docs/index.md",
        "Examples": f"{home}/tree/main/examples",
        "Changelog": f"{home}/blob/main/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }


def readme(text: str, home: str) -> str:
    """The README with links that lead from anywhere to the repository; to nowhere as text."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.S | re.M)  # Every second one is code.
    parts[::2] = [_LINK.sub(rf"[\1]({home}/blob/main/\2)" if home else r"\1", part) for part in parts[::2]]
    return "".join(parts)


class IndexMetadata(MetadataHookInterface):
    """Sets `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by Hatchling for each build."""
        home = os.environ.get("PROJECT_HOME", "").rstrip("/")
        text = (Path(self.root) / "README.md").read_text()
        metadata["readme"] = {"content-type": "text/markdown", "text": readme(text, home)}
        metadata["urls"] = project_urls(home)
