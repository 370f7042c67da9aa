"""A model's tokenizer, from transformers. Prompts come out as in vLLM's own `LLM.chat` and `LLM.generate`.

A chat is rendered as one text and then tokenized. No special tokens are added, because the chat template has already
written them. To a plain prompt, the tokenizer's special tokens are added. In both cases, if a user's text contains the
name of a special token, the name becomes that token. vLLM does the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import jinja2
from jinja2 import nodes

from batchinfer.core.errors import ConfigError, RowError
from batchinfer.engines import find_engine
from batchinfer.engines.bucket_models import with_local_files
from batchinfer.engines.config import EngineConfig
from batchinfer.prompts import Code, Tokenizer
from batchinfer.prompts.conversation import for_template
from batchinfer.prompts.types import RowProblem

logger = logging.getLogger(__name__)

# Names of arguments of transformers' `apply_chat_template` that neither a run nor a request may set. They are ignored.
_RESERVED = frozenset(
    {"chat_template", "tokenize", "conversation", "add_generation_prompt", "continue_final_message"}
)


def load_tokenizer(model: str, revision: str = "", *, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer of a model.

    Args:
        model: Name on the Hub, or a local folder.
        revision: Branch, tag or commit on the Hub; empty for the default branch.
        trust_remote_code: Whether to run code that comes with the model.

    Raises:
        ConfigError: the tokenizer cannot be loaded, or transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            "package transformers: not installed, expected for tokenizing prompts",
            hint="pip install transformers; the extras vllm and cpu bring it along",
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model, revision=revision or None, trust_remote_code=trust_remote_code
        )
    # Loading can fail for many reasons, such as a missing file or package, and each has another class of error.
    except Exception as error:
        raise _not_loaded(model, revision, error) from error
    return HfTokenizer(tokenizer)


def tokenizer_for(config: EngineConfig) -> Tokenizer | None:
    """Load the tokenizer for an engine; None if the engine needs none.

    Raises:
        ConfigError: as in `load_tokenizer`, or the tokenizer's files cannot be fetched from a bucket.
    """
    if not find_engine(config.engine).needs_model:
        return None
    config = with_local_files(config, with_weights=False)
    # --revision names a commit of the model's repository. The repository of another tokenizer has other commits.
    revision = "" if config.tokenizer else config.revision or ""
    return load_tokenizer(
        config.tokenizer or config.model, revision, trust_remote_code=config.trust_remote_code
    )


def _not_loaded(model: str, revision: str, error: Exception) -> ConfigError:
    reason = str(error).strip().splitlines()
    at = f" at revision {revision}" if revision else ""
    hint = (
        "check --model (a name on the Hub or a folder with config.json and tokenizer.json), "
        "HF_TOKEN for gated models, and --tokenizer where the model brings none"
    )
    if "trust_remote_code" in str(error):
        hint = "the model brings its own code: read it, then pass --trust-remote-code"
    return ConfigError(
        f"model {model}{at}: its tokenizer cannot be loaded ({reason[0] if reason else error!r})",
        hint=hint,
    )


class HfTokenizer:
    """Implements `prompts.Tokenizer` with a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.eos_token: str = tokenizer.eos_token or ""
        self.has_chat_template = bool(tokenizer.chat_template)
        self.longest_token = _longest_token(tokenizer)

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        template: str,
        continue_final: bool,
        kwargs: dict[str, Any],
        is_whole: bool = False,
    ) -> str:
        """Render a conversation as one text. See `Tokenizer.apply_chat_template`.

        Raises:
            RowError: the template refuses the conversation.
        """
        source = template or self._default_template(bool(kwargs.get("tools")))
        if kwargs.get("tools") and "tools" not in source:
            _warn_of_hidden_tools(source)
        conversation = [_in_template_form(message, source) for message in messages]
        options = {name: value for name, value in kwargs.items() if name not in _RESERVED}
        try:
            rendered = self._tokenizer.apply_chat_template(
                conversation,
                chat_template=source or None,
                tokenize=False,
                add_generation_prompt=not (continue_final or is_whole),
                continue_final_message=continue_final,
                **options,
            )
        except RowError:
            raise
        except Exception as error:
            # A template may have a bug, or refuse a conversation on purpose, for example if roles do not alternate. It
            # may still render other conversations.
            raise RowProblem(
                Code.TEMPLATE_ERROR, f"chat template: {type(error).__name__}: {str(error)[:500]}"
            ) from error
        return str(rendered)

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of each text. A fast tokenizer releases Python's lock, so other threads can run."""
        encoded = self._tokenizer(
            list(texts),
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        token_ids: list[list[int]] = encoded["input_ids"]
        return token_ids

    def encode_pair(
        self, first: str, second: str, *, max_tokens: int | None
    ) -> tuple[list[int], int | None]:
        """Return the token ids of two texts that the model reads together. See `Tokenizer.encode_pair`.

        Raises:
            RowError: the first text alone has more than `max_tokens` tokens.
        """
        limits = (
            {} if max_tokens is None else {"truncation": "only_second", "max_length": max_tokens}
        )
        if max_tokens is not None:
            least = self._tokenizer(first, "", verbose=False)["input_ids"]
            if len(least) > max_tokens:
                raise RowProblem(
                    Code.PROMPT_TOO_LONG,
                    f"the pair's first text has {len(least)} tokens with special ones, expected at most {max_tokens}",
                )
        encoded = self._tokenizer(
            first, second, return_attention_mask=False, verbose=False, **limits
        )
        token_ids: list[int] = encoded["input_ids"]
        types = encoded.get("token_type_ids")
        if types is None:
            return token_ids, None
        return token_ids, types.index(1) if 1 in types else len(types)

    @cached_property
    def special_tokens(self) -> tuple[int, int]:
        """Number of special tokens before and after a text. See `Tokenizer.special_tokens`."""
        [plain] = self.encode(["a"], add_special_tokens=False)
        [whole] = self.encode(["a"], add_special_tokens=True)
        num_added = len(whole) - len(plain)
        before = next(
            (i for i in range(num_added + 1) if whole[i : i + len(plain)] == plain), num_added
        )
        return before, num_added - before

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids. The text contains the names of special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _default_template(self, has_tools: bool) -> str:
        found = self._tokenizer.chat_template
        if isinstance(found, dict):
            chosen = found.get("tool_use") if has_tools else None
            return str(chosen or found.get("default") or "")
        return str(found or "")


@lru_cache(maxsize=32)
def _warn_of_hidden_tools(_template: str) -> None:
    """Warn once that a chat template does not mention tools."""
    logger.warning(
        "the chat template does not show tools to the model; --chat-template @FILE takes one that does"
    )


def _in_template_form(message: dict[str, Any], source: str) -> dict[str, Any]:
    message = for_template(message)
    content, wants_parts = message["content"], _wants_parts(source)
    if content is None:
        # A message that only calls tools has no content. vLLM gives templates an empty one, and so it is here, except
        # to templates that ask whether the content is none, as DeepSeek's do to find calls.
        return message if _asks_for_none(source) else {**message, "content": ""}
    if isinstance(content, str):
        if not wants_parts:
            return message
        return {**message, "content": [{"type": "text", "text": content}]}
    if wants_parts:
        return message
    if any(part["type"] != "text" for part in content):
        raise RowProblem(Code.TEMPLATE_ERROR, "the chat template takes texts, and no images")
    return {**message, "content": "\n".join(part["text"] for part in content)}


@lru_cache(maxsize=32)
def _wants_parts(template: str) -> bool:
    """Whether a chat template loops over a message's content, as templates of vision models do.

    A template that loops over the content expects a list of parts. Any other template expects a text, and would print a
    list as Python writes it.
    """
    tree = _parse(template)
    return tree is not None and any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))


@lru_cache(maxsize=32)
def _asks_for_none(template: str) -> bool:
    """Whether a chat template tests if a message's content is none."""
    tests = tree.find_all(nodes.Test) if (tree := _parse(template)) is not None else ()
    return any(test.name == "none" and _is_content(test.node) for test in tests)


def _parse(template: str) -> nodes.Template | None:
    # Plain Jinja cannot parse the tag `generation`, which transformers defines for training. So `if` replaces the tag.
    plain = template.replace("endgeneration", "endif").replace("{% generation", "{% if true")
    plain = plain.replace("{%- generation", "{%- if true")
    try:
        return jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)  # noqa: S701 -- parsed, never rendered
    except jinja2.TemplateError:
        return None


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Filter | nodes.Test) and node.node is not None:
        return _is_content(node.node)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node)
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name == "content"


def _longest_token(tokenizer: Any) -> int:
    if not getattr(tokenizer, "is_fast", False):
        return 0
    return max((len(token) for token in tokenizer.get_vocab()), default=0)
