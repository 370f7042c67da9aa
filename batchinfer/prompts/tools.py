"""Tools that a model may call: how options, columns and requests state them, and the constraint that a choice implies.

The names and their meaning are those of the OpenAI API, as vLLM's server understands them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchinfer.core.errors import ConfigError, near
from batchinfer.core.records import AnswerForm, Sampling
from batchinfer.prompts.constraint_process import ConstraintChecker
from batchinfer.prompts.constraints import Constraint, ConstraintProblem, decode_json
from batchinfer.prompts.json_lines import json_type
from batchinfer.prompts.types import Code, PromptConfig, RowProblem

FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
"""Request parameters that this module reads."""
WORDS = ("auto", "required", "none")
"""Values of `tool_choice` that name no tool."""
NAMED = "named"
"""Value of `AnswerForm.tool_choice` when one tool must be called."""


class ToolProblem(Exception):
    """The reason why a value is no list of tools, or no choice among them. `param` is the request parameter."""

    def __init__(self, message: str, param: str = "tools") -> None:
        super().__init__(message)
        self.param = param


# --------------------------------------------------------------------------- reading


def read_tools(value: Any) -> list[dict[str, Any]]:
    """Return tools in the form of the OpenAI API.

    A tool may also be its function alone, as many data sets store it: an object with a `name` and without `function`.

    Raises:
        ToolProblem: the value is no list of tools, or is empty.
    """
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else f"a JSON {json_type(value)}"
        raise ToolProblem(f"{what}, expected a list of tools")
    return [_read_tool(item, index) for index, item in enumerate(value)]


def _read_tool(item: Any, index: int) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise ToolProblem(f"tool {index} is a JSON {json_type(item)}, expected an object")
    if "function" not in item and isinstance(item.get("name"), str):
        item = {"type": "function", "function": {k: v for k, v in item.items() if k != "type"}}
    function = item.get("function")
    if item.get("type") != "function" or not isinstance(function, dict):
        raise ToolProblem(f"tool {index}: expected type function, and an object in its function")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise ToolProblem(f"tool {index}: its function has no name, expected a text")
    if parameters is not None and not isinstance(parameters, dict):
        raise ToolProblem(
            f"tool {name}: its parameters are a JSON {json_type(parameters)}, expected a schema"
        )
    for field, kind, expected in (
        ("description", str, "a text"),
        ("strict", bool, "true or false"),
    ):
        value = function.get(field)
        if value is not None and not isinstance(value, kind):
            raise ToolProblem(
                f"tool {name}: its {field} is a JSON {json_type(value)}, expected {expected}"
            )
    return {**item}


def read_choice(value: Any, tools: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the choice that a request's `tool_choice` makes: its word or `NAMED`, and the name of the tool.

    Raises:
        ToolProblem: it is no choice, or names a tool that is not there.
    """
    if value is None:
        return "auto", ""
    if isinstance(value, str) and value in WORDS:
        return value, ""
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ToolProblem(
            f"{str(value)[:60]!r}, expected {', '.join(WORDS)}, or a tool as in "
            '{"type": "function", "function": {"name": "…"}}',
            "tool_choice",
        )
    names = names_of(tools)
    if name not in names:
        raise ToolProblem(f"no tool {name!r} in tools{near(name, names)}", "tool_choice")
    return NAMED, name


def names_of(tools: list[dict[str, Any]]) -> list[str]:
    """Return the names of tools in the form of the OpenAI API."""
    return [str(tool["function"]["name"]) for tool in tools]


def form_of_request(body: Mapping[str, Any]) -> AnswerForm | None:
    """Return the tools of a chat request, and its choice among them; None if it has no tools.

    Raises:
        RowProblem: one of `FIELDS` has a wrong value.
    """
    try:
        choice, is_parallel = body.get("tool_choice"), body.get("parallel_tool_calls")
        if is_parallel is not None and not isinstance(is_parallel, bool):
            raise ToolProblem("expected true or false", "parallel_tool_calls")
        if body.get("tools") in (None, []):
            if choice in (None, "none", "auto"):
                return None
            raise ToolProblem("given without tools, expected tools with it", "tool_choice")
        tools = read_tools(body["tools"])
        word, name = read_choice(choice, tools)
    except ToolProblem as problem:
        raise RowProblem(
            Code.INVALID_PARAMETER, f"{problem.param}: {problem}", param=problem.param
        ) from problem
    return AnswerForm(
        tools=tools, tool_choice=word, tool_name=name, is_parallel=is_parallel is not False
    )


def as_parameters(form: AnswerForm) -> dict[str, Any]:
    """Return tools, and the choice among them, as parameters of a chat request."""
    choice: Any = form.tool_choice
    if choice == NAMED:
        choice = {"type": "function", "function": {"name": form.tool_name}}
    return {"tools": form.tools, "tool_choice": choice}


class RowTools:
    """The tools of rows that are no requests: those of ``--tools``, or of a row's own column.

    Raises:
        ConfigError: options contradict each other, or the file of ``--tools`` holds no list of tools.
    """

    def __init__(self, config: PromptConfig, *, finds_calls: bool) -> None:
        self._choice = config.tool_choice or "auto"
        self._column = config.tools_column or ""
        self._finds_calls = finds_calls
        self._runs: AnswerForm | None = None
        if self._choice == "auto" and not finds_calls and (config.tools or self._column):
            flag = "--tools" if config.tools else "--tools-column"
            raise ConfigError(
                f"{flag} without --tool-call-parser: calls in answers would not be found",
                hint="add --tool-call-parser with the parser for your model (docs/tools.md), or --tool-choice required",
            )
        if config.tools:
            try:
                self._runs = self._form(config.tools)
            except ToolProblem as problem:
                flag = "--tool-choice" if problem.param == "tool_choice" else "--tools"
                raise ConfigError(f"{flag}: {problem}") from problem
        elif config.tool_choice and not self._column:
            raise ConfigError(
                f"--tool-choice {config.tool_choice}: the run has no tools",
                hint="add --tools FILE, a JSON list of tools, or --tools-column COLUMN",
            )

    def form_of(self, value: Any) -> AnswerForm | None:
        """Return the tools of a row, by its value in the column of tools; those of the run if it has none of its own.

        Raises:
            RowProblem: the value is no list of tools, nor JSON text of one, or lacks the chosen tool.
        """
        try:
            if isinstance(value, str) and value:
                value = decode_json(value)
            return self._form(value) if value else self._runs
        except (ToolProblem, ConstraintProblem) as problem:
            raise RowProblem(Code.INVALID_TOOLS, f"column {self._column!r}: {problem}") from problem

    def _form(self, value: Any) -> AnswerForm:
        tools = read_tools(value)
        is_word = self._choice in WORDS
        choice = self._choice if is_word else {"function": {"name": self._choice}}
        word, name = read_choice(choice, tools)
        return AnswerForm(tools=tools, tool_choice=word, tool_name=name)


# --------------------------------------------------------------------------- the constraint of a choice


def is_forced(form: AnswerForm | None) -> bool:
    """Whether the answer must be a call, so that a constraint makes it one."""
    return form is not None and form.tool_choice in ("required", NAMED)


def constraint_of(form: AnswerForm) -> Constraint:
    """Return the constraint that makes an answer the calls that a forced choice asks for.

    A named tool's answer is the object of its arguments. Any other forced answer is a list of {name, parameters}. The
    schemas are those of vLLM's `get_json_schema_from_tools`.

    Raises:
        ToolProblem: two tools give the same name in `$defs` different schemas.
    """
    functions = [tool["function"] for tool in form.tools or ()]
    if form.tool_choice == NAMED:
        function = next(each for each in functions if each["name"] == form.tool_name)
        return {"json": _parameters_of(function)}
    definitions: dict[str, Any] = {}
    choices = []
    for function in functions:
        parameters = dict(_parameters_of(function))
        own = parameters.pop("$defs", {})
        for name, schema in own.items() if isinstance(own, dict) else ():
            if definitions.setdefault(name, schema) != schema:
                raise ToolProblem(f"the tools give {name!r} in $defs different schemas")
        properties = {
            "name": {"type": "string", "enum": [function["name"]]},
            "parameters": parameters,
        }
        choices.append({"properties": properties, "required": ["name", "parameters"]})
    schema = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": choices}}
    if not form.is_parallel:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return {"json": schema}


def check_run_tools(
    prompt: PromptConfig, sampling: Sampling, checker: ConstraintChecker | None
) -> None:
    """Refuse a forced choice of tools beside another constraint, and tools whose schemas do not compile.

    Without a checker, the second is left to the engine. The tools of rows' own columns are not checked here.

    Raises:
        ConfigError: the message says which.
    """
    choice = prompt.tool_choice or "auto"
    if choice in ("auto", "none"):
        return
    if sampling.structured:
        raise ConfigError(
            f"--tool-choice {choice} with a constraint: each decides the answer's form",
            hint="keep one of them",
        )
    form = RowTools(prompt, finds_calls=True).form_of(None)
    if form is None or checker is None:
        return
    try:
        problem = checker.problem_of(constraint_of(form))
    except ToolProblem as error:
        problem = str(error)
    if problem:
        raise ConfigError(
            f"--tools: a schema of parameters {problem}",
            hint="see docs/tools.md for what schemas may hold",
        )


def _parameters_of(function: dict[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or {"type": "object", "properties": {}}
