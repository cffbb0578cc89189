"""A hook of MkDocs: the README is a page of the site, and files outside of docs/ are named instead of linked to."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

README = Path(__file__).parents[1] / "README.md"


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, "readme.md", content=README.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri == "readme.md":
        markdown = re.sub(r"\]\(docs/", "](", markdown)
        return re.sub(r"\[([^\]]+)\]\((?:examples|benchmarks|LICENSE)[^)]*\)", r"\1", markdown)
    markdown = markdown.replace("](../README.md", "](readme.md")
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", markdown)
