"""README and docs are true: every block of code runs, every link leads somewhere, every quoted message is the code's.

A block's language says what becomes of it: `python`, `console` and `yaml` are run or loaded; whatever is not is `text`.
"""

import ast
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.strategies import Strategy
from markdown_it import MarkdownIt
from markdown_it.token import Token

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.cli import main

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_roundpipe"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = [ROOT / "benchmarks" / "README.md"]
COMMAND = "python -m lightning_roundpipe "
every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)


def parsed(path: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(path.read_text(encoding="utf-8"))


def blocks(path: Path) -> list[tuple[str, str]]:
    """Of each block of code its language and content."""
    return [(token.info, token.content) for token in parsed(path) if token.type in ("fence", "code_block")]


@every_document
def test_code_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Block after block as a reader would, in one namespace for each document, on two batches instead of all.

    A block that begins with a comment such as `# my_model.py` is also saved as that file.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for option, value in {"LIMIT_TRAIN_BATCHES": "2", "LOGGER": "False", "ENABLE_CHECKPOINTING": "False"}.items():
        monkeypatch.setenv(f"PL_TRAINER_{option}", value)
    monkeypatch.setenv("COLUMNS", "80")
    namespace: dict[str, Any] = {"__name__": path.stem}
    printed = ""
    for language, content in blocks(path):
        if name := re.match(r"# (\w+)\.py\n", content):
            (tmp_path / f"{name[1]}.py").write_text(content)
            monkeypatch.delitem(sys.modules, name[1], raising=False)  # another document's
        if language == "python":
            exec(compile(content, str(path), "exec"), namespace)
            printed += capsys.readouterr().out
        elif language == "console":
            run(content, capsys)
        elif language == "yaml":
            check_strategies(yaml.safe_load(content))
        else:
            assert language == "text", f"{path.name}: a block is marked {language!r}:\n{content}"
    if path.name == "README.md":
        check_readme(namespace, printed)


def check_readme(namespace: dict[str, Any], printed: str) -> None:
    trainer = namespace["trainer"]
    assert trainer.global_step == 2 and isinstance(trainer.strategy, RoundPipeStrategy)
    assert sum(row.kind == "TransformerEncoderLayer" for row in trainer.strategy.report().layers) == 8
    assert trainer.strategy.microbatches == 4 and trainer.strategy.layers == ["TransformerEncoderLayer"]
    assert "4 microbatches" in printed
    assert "\nOK. Loss and gradients through the pipeline equal those" in f"\n{printed}"


def run(session: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs the package's commands of a console session; others must name files and targets that exist.

    What stands below a command, is its output.
    """
    joined = re.sub(r"\\\n *", "", session)
    commands = [part.partition("\n") for part in re.split(r"^\$ ", joined, flags=re.MULTILINE)[1:]]
    assert commands and session.startswith("$ "), f"no command in\n{session}"
    for command, _, output in commands:
        if command.startswith(COMMAND):
            assert main(shlex.split(command.removeprefix(COMMAND))) == 0, command
            printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
            assert output.strip("\n") in printed, f"{command}\nprints\n{printed}"
        elif target := re.fullmatch(r"make (\w+)( .*)?", command):
            assert re.search(rf"^{target[1]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE), command
        else:
            script = re.fullmatch(r"python (examples/\w+\.py)( .*)?", command)
            assert script and (ROOT / script[1]).exists(), f"{command}: mark what is not to be run as text"


def check_strategies(config: Any) -> None:
    """A Trainer's strategy in a config file takes its arguments."""
    strategy = config["trainer"]["strategy"]
    module, _, name = strategy["class_path"].rpartition(".")
    assert isinstance(getattr(import_module(module), name)(**strategy["init_args"]), Strategy)


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as code hosts make them."""
    tokens = parsed(path)
    texts = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in texts}


def targets(path: Path) -> list[str]:
    """What a document links to, pictures included."""
    inline = [child for token in parsed(path) for child in token.children or ()]
    found = [str(token.attrs.get("href") or token.attrs.get("src") or "") for token in inline]
    return [target for target in found if target and not target.startswith(("https://", "http://"))]


@pytest.mark.parametrize("path", [*DOCUMENTS, *OTHERS], ids=lambda path: str(path.relative_to(ROOT)))
def test_links(path: Path) -> None:
    for target in targets(path):
        name, _, anchor = target.partition("#")
        other = (path.parent / name).resolve() if name else path
        assert other.is_relative_to(ROOT) and other.exists(), f"{path.name}: {target}"
        assert not anchor or anchor in anchors(other), f"{path.name}: {target}"


def test_every_page_is_found_from_the_start() -> None:
    """By links, and in the contents of the site."""
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages - {"index.md"} <= set(targets(ROOT / "docs" / "index.md"))
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    entries = [entry for section in site["nav"] for part in section.values() for entry in part]
    names = [entry if isinstance(entry, str) else "".join(entry.values()) for entry in entries]
    assert sorted(names) == sorted([*pages, "readme.md"])


def test_site_builds(tmp_path: Path) -> None:
    """Without a warning: every page is listed, and every link and anchor of the site leads somewhere."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    for name in ("index.html", "readme/index.html", "choosing/index.html", "pictures/two_batches.png"):
        assert (tmp_path / name).exists(), name


def messages() -> str:
    """All texts in the package, their varying parts as `…`."""

    def text(node: ast.expr) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(text(part) for part in node.values)
        return str(node.value) if isinstance(node, ast.Constant) else "…"

    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "lightning_roundpipe").rglob("*.py")]
    strings = [node for tree in trees for node in ast.walk(tree) if isinstance(node, (ast.JoinedStr, ast.Constant))]
    return "\n".join(text(node) for node in strings)


def test_messages_are_the_packages() -> None:
    """The headings of docs/troubleshooting.md that quote a message: someone looks for it there who has met it."""
    headings = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), flags=re.MULTILINE)
    known = messages()
    assert len(headings) >= 10
    for heading in headings:
        assert heading in known, heading


def test_arrows_point_down() -> None:
    """Every module has its row in the architecture, and imports none of a row above."""
    architecture = blocks(ROOT / "docs" / "architecture.md")
    table = next(content for _, content in architecture if "strategy.py" in content)
    rows: dict[str, int] = {}
    for number, line in enumerate(table.splitlines()):
        folder = ""
        for name in line.split():
            if name == "...":  # the rest of the folder
                rows |= {f"{folder}{path.stem}": number for path in (PACKAGE / folder).glob("[!_]*.py")} | rows
            if (found := re.fullmatch(r"(\w+/)?(\w+)\.py", name)) is None:
                break  # in words, what they are for
            folder = found[1] or folder
            rows[f"{folder}{found[2]}" if (PACKAGE / folder / f"{found[2]}.py").exists() else found[2]] = number
    for path in PACKAGE.rglob("[!_]*.py"):
        module = path.relative_to(PACKAGE).with_suffix("").as_posix()
        imports = re.findall(r"^from lightning_roundpipe\.([\w.]+) import", path.read_text(), flags=re.MULTILINE)
        for imported in (each.replace(".", "/") for each in imports):
            assert rows.get(imported, rows[module]) >= rows[module], f"{module} imports {imported}"
