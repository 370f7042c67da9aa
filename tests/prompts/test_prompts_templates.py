"""Templates: the named ones, own Jinja over columns, and the sandbox that makes them end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Sampling
from batchinfer.prompts import PromptBuilder, PromptConfig, RawRow, list_templates, render_process
from batchinfer.prompts.render_process import RenderProcess


def make(row: dict[str, object], **options):
    builder = PromptBuilder(PromptConfig(**options), Sampling(), None, None, None)
    return builder.build("c", 0, [RawRow(0, json.dumps(row).encode())])[0]


def render(template: str, row: dict[str, object] | None = None, **options) -> str:
    prepared = make(row or {}, prompt_template=template, **options)
    assert prepared.request is not None, prepared.failure
    return prepared.request.text


@pytest.fixture
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_process, "ROW_SECONDS", 0.2)
    monkeypatch.setattr(render_process, "MEMORY_BYTES", 400 << 20)


def failure(template: str, row: dict[str, object] | None = None):
    prepared = make(row or {}, prompt_template=template)
    assert prepared.failure is not None, prepared.request
    return prepared.failure


def test_every_named_template_renders_its_own_columns():
    assert {template.name for template in list_templates()} == {
        "alpaca",
        "gpteacher",
        "sharegpt",
        "completion",
        "question-answer",
        "summarise",
    }
    for template in list_templates():
        assert template.description
        if template.source:
            row = {name: f"<{name}>" for name in template.columns}
            text = make(row, template_name=template.name).request.text
            assert f"<{template.columns[0]}>" in text


def test_alpaca_has_a_form_with_and_one_without_input():
    with_input = make({"instruction": "Add", "input": "1 1"}, template_name="alpaca").request.text
    without = make({"instruction": "Add", "input": ""}, template_name="alpaca").request.text
    assert with_input.endswith("\n\n### Instruction:\nAdd\n\n### Input:\n1 1\n\n### Response:")
    assert without == make({"instruction": "Add"}, template_name="alpaca").request.text
    assert without.endswith("completes the request.\n\n### Instruction:\nAdd\n\n### Response:")


def test_sharegpt_is_a_chat_of_the_conversations_column():
    prepared = make({"conversations": [{"from": "human", "value": "hi"}]}, template_name="sharegpt")
    assert prepared.request.messages == [{"role": "user", "content": "hi"}]


def test_examples_stand_before_the_prompt_with_their_answers():
    prepared = make(
        {"question": "2+2?"},
        template_name="question-answer",
        few_shot=[{"question": "1+1?", "answer": 2}],
    )
    assert prepared.request.text == "Question: 1+1?\nAnswer: 2\n\nQuestion: 2+2?\nAnswer:"


def test_an_example_without_an_answer_is_refused():
    with pytest.raises(ConfigError, match="example 0: no answer"):
        make({}, template_name="alpaca", few_shot=[{"instruction": "x"}])
    with pytest.raises(ConfigError, match="no place for examples"):
        make({}, template_name="completion", few_shot=[{"text": "x"}])


def test_blank_columns_are_empty_for_the_template():
    text = render("{{ q }}|{{ a }}", {"q": "x", "a": "secret"}, blank_columns=["a"])
    assert text == "x|"


def test_a_template_sees_columns_row_examples_and_system_prompt():
    text = render(
        "{{ q }} {{ row['odd name'] }} {{ system_prompt }}"
        "{% for example in examples %} {{ example.q }}{% endfor %}",
        {"q": "a", "odd name": "b"},
        system_prompt="s",
        few_shot=[{"q": "e"}],
    )
    assert text == "a b s e"


def test_a_missing_column_is_named():
    found = failure("{{ question }}", {"qestion": "x"})
    assert found.code == "missing_column"
    assert "did you mean 'qestion'?" in found.message
    assert render("{{ x | default('none') }}") == "none"
    assert failure("{{ q.inner.more }}", {"q": {}}).code == "template_error"


def test_json_is_written_as_it_is():
    assert render("{{ q | tojson }}", {"q": {"a": "<é>"}}) == '{"a": "<é>"}'


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ q['__class__'] }}",
        "{% include 'x' %}",
        "{% extends 'x' %}",
        "{% import 'x' as y %}",
        "{% for i in %}",
        "{{ q | random }}",
        "{{ q | nosuchfilter }}",
    ],
)
def test_a_template_that_could_not_work_is_refused_at_once(template):
    with pytest.raises(ConfigError, match="--prompt-template"):
        make({}, prompt_template=template)


@pytest.mark.usefixtures("low_limits")
@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'x' * 10**10 }}",
        "{{ [0] * 10**10 }}",
        "{{ x ** 100000000 }}",
        "{{ 'x'.ljust(10**10) }}",
        "{{ 'x' | center(10**10) }}",
        "{{ 'x' | indent(10**10, true) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**10) }}",
        "{{ '%*d' % (10**10, 1) }}",
        (
            "{% set ns = namespace(x='xxxxxxxxxx') %}"
            "{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
        ),
        (
            "{% set ns = namespace(x='xxxxxxxxxx') %}"
            "{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
        ),
        "{% set big = 'x' * 1000000 %}{% for i in range(1100) %}{{ big }}{% endfor %}",
        "{% set big = 'x' * 100000 %}{{ big | replace('x', big) }}",
        "{% set big = 'x' * 100000 %}{{ big.replace('x', big) }}",
        "{{ 1 // 0 }}",
        "{{ q.append(1) }}",
        "{{ q['_' ~ '_class__']['__mro__'.strip()] }}",
        "{{ '\\ud800' }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_that_goes_too_far_is_the_rows_error(template):
    assert failure(template, {"q": [1], "x": 10}).code == "template_error"


@pytest.mark.usefixtures("low_limits")
@pytest.mark.parametrize(
    "template",
    [
        "{{ ([a] * 100) | join }}",
        "{{ a | replace(old='x', new=a) }}",
        "{{ '{0:>{1}}'.format('a', wide) }}",
        "{{ a | indent('x' * 100000) }}",
        "{{ ([a] * 1000) | tojson }}",
        "{{ ('%999999d' * n) % ((x,) * n) }}",
        "{% set b %}{% for i in range(100) %}{{ a }}{% endfor %}{% endset %}{{ b }}",
        "{{ a.translate({120: a}) }}",
        "{{ 'x' * wide | int }}",
        "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{{ ([x] * (n * 5000)) | sum }}",
        "{{ x ** 100000000 }}",
    ],
)
def test_no_template_gets_around_the_limits_of_memory_and_time(template):
    row = {"a": "x\n" * 5_000_000, "wide": "900000000", "x": 10, "n": 60000}
    found = failure(template, row)
    assert found.code == "template_error"
    assert re.search("more than (0.2 s of CPU time|400 MiB of memory)", found.message)


@pytest.mark.usefixtures("low_limits")
def test_a_template_that_hangs_while_it_is_compiled_is_refused():
    with pytest.raises(ConfigError, match=r"cannot be compiled: took more than 0\.2 s of CPU time"):
        make({}, prompt_template="{{ 10 ** 100000000 }}")


@pytest.mark.usefixtures("low_limits")
def test_only_the_rows_that_go_over_a_limit_fail():
    builder = PromptBuilder(
        PromptConfig(prompt_template="{{ i }}{{ x ** (n | int) if n else '' }}", keep=["i"]),
        Sampling(),
        None,
        None,
        None,
    )
    lines = [
        {"i": i, "x": 10, "n": "100000000" if i in (3, 7) else "2" if i == 5 else ""}
        for i in range(9)
    ]
    rows = [RawRow(i, json.dumps(line).encode()) for i, line in enumerate(lines)]
    for _ in range(2):
        built = builder.build("c", 0, rows)
        assert [item.request.text if item.request else item.failure.code for item in built] == [
            *("0", "1", "2", "template_error", "4", "5100", "6", "template_error", "8")
        ]
        assert [item.source for item in built] == [{"i": i} for i in range(9)]


@pytest.mark.usefixtures("low_limits")
def test_few_rows_are_asked_for_at_once_until_a_template_has_rendered_some_and_after_each_kill():
    """A template that is bad for every row would keep 512 rows from the worker's counts for a quarter of an hour."""
    config = PromptConfig(prompt_template="{{ 10 ** (n | int) }}")
    builder = PromptBuilder(config, Sampling(), None, None, None)
    found = [builder.rows_at_once]
    for power in ("1", "100000000", "2"):
        builder.build("c", 0, [RawRow(i, b'{"n": "%s"}' % power.encode()) for i in range(2)])
        found.append(builder.rows_at_once)
    many = PromptBuilder(PromptConfig(prompt_column="p"), Sampling(), None, None, None).rows_at_once
    assert found == [16, many, 16, many]


def children(pid: int) -> list[int]:
    return [
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    ]


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_process_that_is_killed_from_outside_costs_no_row(num_rows):
    before = set(children(os.getpid()))
    process = RenderProcess("{{ x }}", name="t", values={})
    lines = [b'{"x":%d}' % i for i in range(num_rows)]
    for _ in range(3):
        [child] = set(children(os.getpid())) - before
        os.kill(child, signal.SIGKILL)
        assert [text.text for text in process.render(lines)] == [str(i) for i in range(num_rows)]


def test_the_process_ends_with_its_template_and_with_the_worker():
    before = set(children(os.getpid()))
    process = RenderProcess("{{ x }}", name="t", values={})
    assert set(children(os.getpid())) - before
    del process
    assert set(children(os.getpid())) == before

    code = (
        "from batchinfer.prompts.render_process import RenderProcess\n"
        "process = RenderProcess('{{ x }}', name='t', values={})\n"
        "print(process.render([b'{}'])[0].code, flush=True)\n"
        "input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdout.readline() == b"missing_column\n"
        [child] = children(worker.pid)
        worker.kill()
    # The test ends by its own time limit if the process lives on.
    while Path(f"/proc/{child}/exe").exists():
        time.sleep(0.05)


def test_threads_take_turns_with_one_template():
    process = RenderProcess("{{ x }}", name="t", values={})
    with ThreadPoolExecutor(4) as pool:
        batches = [[b'{"x":%d}' % (7 * i + j) for j in range(7)] for i in range(40)]
        for i, texts in enumerate(pool.map(process.render, batches)):
            assert [text.text for text in texts] == [str(7 * i + j) for j in range(7)]


def test_a_chat_template_that_loops_is_refused_at_once():
    with pytest.raises(ConfigError, match="--chat-template"):
        make(
            {},
            messages_column="m",
            chat_template="{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        )


def test_loops_keep_their_helpers():
    text = render(
        "{% for x in xs %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}",
        {"xs": [1, 2]},
    )
    assert text == "1/2,2/2"


def test_a_render_does_not_use_up_the_next_ones_budget():
    builder = PromptBuilder(
        PromptConfig(prompt_template="{% for i in range(9000) %}{{ x }}{% endfor %}"),
        Sampling(),
        None,
        None,
        None,
    )
    rows = [RawRow(index, b'{"x":"y"}') for index in range(40)]
    assert all(item.request for item in builder.build("c", 0, rows))


@pytest.mark.parametrize(
    ("template", "columns"),
    [
        ("{{ a }} {{ row.b }} {{ row['c'] }} {{ row | tojson }}", ["a", "b", "c"]),
        ("{% for x in a %}{{ x.b }}{{ loop.index }}{% endfor %}", ["a"]),
        ("{{ a | default('x') }}{{ b is defined }}{{ row.c is undefined }}{{ d | upper }}", ["d"]),
        ("{% if a %}{{ b }}{{ c }}{% else %}{{ b }}{% endif %}{% if d %}{{ e }}{% endif %}", ["a", "b", "d"]),
        ("{{ a if b else c }}{{ a if b else a }}{{ d or e }}", ["a", "b", "d"]),
        ("{% set a = b %}{{ a }}{% macro f(x) %}{{ x }}{{ y }}{% endmacro %}{{ f(c) }}", ["b", "c"]),
        ("{{ examples | length }}{{ system_prompt }}{{ range(3) }}{{ row.items() }}{{ namespace() }}", []),
        ("{% set a = a if a is defined else b %}{{ a }}", []),
        ("{{ blank }}{{ 'a' }}{{ row.get('x') }}", []),
    ],
)  # fmt: skip
def test_the_columns_that_a_template_always_reads_are_known(template, columns):
    config = PromptConfig(prompt_template=template, blank_columns=["blank"])
    builder = PromptBuilder(config, Sampling(), None, None, None)
    assert builder.needed_columns["--prompt-template: the variable"] == columns


def test_named_templates_know_the_columns_that_they_need():
    needed = {}
    for template in list_templates():
        config = PromptConfig(template_name=template.name)
        [*_, names] = PromptBuilder(config, Sampling(), None, None, None).needed_columns.values()
        needed[template.name] = names
    assert needed == {
        "alpaca": ["instruction"],
        "gpteacher": ["instruction"],
        "sharegpt": ["conversations"],
        "completion": ["text"],
        "question-answer": ["question"],
        "summarise": [],
    }
