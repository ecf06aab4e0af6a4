"""The documents say what the code says: tables, names, links, and the README's example."""

import ast
import dataclasses
import os
import re
from pathlib import Path

import pytest
from engines import pair

import kvpush

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
README = (ROOT / "README.md").read_text()

PROMISES = (
    "Flat cost",
    "Live KV is never a remote target",
    "Never another prompt's KV",
    "Every transfer ends",
    "Cancel is immediate",
    "Fails closed",
    "No Python on the data path",
    "One code path",
)
# Of docs/reliability.md: correctness, failure, bad input, cost.
CASES = {"C": 11, "F": 15, "B": 6, "P": 4}


def page(name):
    return (ROOT / "docs" / name).read_text()


def table_after(text, mark):
    """Rows of the first table behind `mark`, as lists of cells, without heading and ruler."""
    lines = text[text.index(mark) + len(mark) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows[2:]


def quoted(cell):
    return re.findall(r"`([^`]+)`", cell)


def anchors(path):
    """Names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_status_codes_are_those_of_the_core():
    source = (ROOT / "csrc" / "protocol" / "fail_code.cpp").read_text()
    codes = re.findall(r'case FailCode::k\w+: return "(\w+)";', source)
    header = (ROOT / "csrc" / "protocol" / "fail_code.hpp").read_text()
    enumerators = re.findall(r"^\s+k[A-Z]\w*( = 0)?,", header, re.MULTILINE)
    assert len(codes) == len(enumerators) > 10
    rows = table_after(page("errors.md"), "## Event status")
    assert [quoted(row[0]) for row in rows] == [[code] for code in codes]
    for code, side, meaning, advice in rows:
        assert set(side.split(", ")) <= {"push", "receive", "lost"}, code
        assert meaning, code
        assert advice, code


def test_exceptions_are_those_of_the_package():
    rows = table_after(page("errors.md"), "## Exceptions")
    documented = {quoted(row[0])[0]: quoted(row[1]) for row in rows}
    base = kvpush.KvpushError
    classes = {
        name: value
        for name, value in vars(kvpush).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    }
    assert set(documented) == set(classes)
    for name, parents in documented.items():
        assert [cls.__name__ for cls in classes[name].__bases__ if cls is not base] == parents, name


def test_settings_are_the_fields_of_config():
    rows = table_after(README, "<!-- settings:")
    documented = {quoted(row[0])[0]: row[1].strip("`") for row in rows}
    expected = {}
    for field in dataclasses.fields(kvpush.Config):
        default = field.default
        text = ",".join(default) if isinstance(default, tuple) else str(default)
        expected[f"KVPUSH_{field.name.upper()}"] = text or "(empty)"
    assert documented == expected
    assert kvpush.Config.from_env({k: v for k, v in documented.items() if v != "(empty)"}) == kvpush.Config()


def test_every_environment_variable_is_documented():
    text = "".join(path.read_text() for path in PAGES)
    sources = [*(ROOT / "python").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]
    read = {name for path in sources for name in re.findall(r'"(KVPUSH_[A-Z_]+[A-Z])"', path.read_text())}
    assert read
    assert {name for name in read if name not in text} == set()


def test_statistics_are_those_of_an_engine():
    rows = table_after(page("metrics.md"), "## Engine.stats()")
    documented = [name for row in rows for name in quoted(row[0])]
    with pair("shm") as two:
        names = set(two.p.stats())
    assert sorted(documented) == sorted(names)


def test_prometheus_names_are_those_of_the_connector():
    tree = ast.parse((ROOT / "python" / "kvpush" / "vllm" / "metrics.py").read_text())
    expected = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in (
            *("COUNTERS", "TIMES", "GAUGES", "LABELLED"),
        ):
            for name, value in ast.literal_eval(node.value).items():
                label = f"{{{value[0]}}}" if isinstance(value, tuple) else ""
                expected.add(f"vllm:kvpush_{name}{label}")
    assert len(expected) > 10
    rows = table_after(page("metrics.md"), "## Prometheus")
    assert {name for row in rows for name in quoted(row[0])} == expected


def test_messages_are_those_of_the_protocol():
    source = (ROOT / "csrc" / "protocol" / "messages.cpp").read_text()
    names = re.findall(r'"([A-Z]+)"', source[source.index("kNames") :].split(";", 1)[0])
    rows = table_after(page("protocol.md"), "## Messages")
    assert [(row[0], row[1]) for row in rows] == [(name, str(i)) for i, name in enumerate(names)]


def test_directories_are_those_of_the_rule():
    from test_layering import ALLOWED

    documented = {
        name for row in table_after(page("design.md"), "What a directory of") for name in quoted(row[0])
    }
    assert documented == set(ALLOWED)


def test_promises_are_in_the_readme_and_in_the_design():
    for number, promise in enumerate(PROMISES, 1):
        assert re.search(rf"^{number}\. \*\*{promise}\b", README, re.MULTILINE), promise
        assert f"| {promise} |" in page("design.md"), promise


def test_tests_named_in_the_reliability_page_exist():
    """What a promise or case names is a test, a mutant or the simulation; each case has all of its tests."""
    pattern = r"^def (test_\w+)|^ *(?:KVPUSH_CONFORMANCE_)?TEST\((?:subject, )?(\w+)\)"
    tests = {"kvpush_sim"}
    for path in (ROOT / "tests").rglob("*.*"):
        if path.suffix in (".py", ".cpp", ".hpp"):
            tests |= {a or b for a, b in re.findall(pattern, path.read_text(), re.MULTILINE)}
    mutants = (ROOT / "tests" / "sim" / "mutants.py").read_text()
    known = tests | set(re.findall(r'^    Mutant\(\s*"(\w+)"', mutants, re.MULTILINE))
    assert len(known) > len(tests) + 40 > 400

    text = page("reliability.md")
    named = {"promises": " ".join(re.findall(r"Without it would fail:(.*?)\n\n", text, re.DOTALL))}
    for kind in ("Correctness", "Failure and liveness", "Bad input", "Cost"):
        named |= {row[0].split(",")[0]: row[2] for row in table_after(text, f"### {kind}")}
    cases = [f"{kind}{i + 1}" for kind, count in CASES.items() for i in range(count)]
    assert list(named) == ["promises", *cases]
    for case, cell in named.items():
        names = {name for name in quoted(cell) if re.fullmatch(r"[a-z]\w+", name)}
        assert names, case
        assert names - known == set(), case
        its_own = {name for name in tests if name.startswith(f"test_case_{case.lower()}_")}
        assert its_own - names == set(), case
    assert {name for name in quoted(text) if name.startswith("test_")} - known == set()


def test_extras_in_the_readme_exist():
    project = (ROOT / "pyproject.toml").read_text()
    named = re.findall(r"pip install '\.\[(\w+)\]'", README)
    assert named
    for extra in named:
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra


def test_readme_examples_run():
    examples = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("path", PAGES, ids=lambda path: os.path.relpath(path, ROOT))
def test_links_lead_somewhere(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked), target


@pytest.mark.parametrize("path", PAGES, ids=lambda path: os.path.relpath(path, ROOT))
def test_files_named_in_the_text_exist(path):
    """Paths into the tree, in backticks, are real."""
    named = re.findall(
        r"`((?:csrc|tests|python|docs|protocol|engine|transport|pack)/[\w./*-]+)`", path.read_text()
    )
    for name in named:
        found = [base for base in (ROOT, ROOT / "csrc") if any(base.glob(name.rstrip("/")))]
        assert found, name


def test_decisions_are_numbered_without_gaps():
    pages = sorted((ROOT / "docs" / "adr").glob("*.md"))
    for number, path in enumerate(pages, 1):
        text = path.read_text()
        assert path.name.startswith(f"{number:04d}-"), path.name
        assert text.startswith(f"# {number}. "), path.name
        positions = [text.index(part) for part in ("**Context.**", "**Decision.**", "**Consequence.**")]
        assert positions == sorted(positions), path.name
