"""Makes vLLM's input of a request with images, by vLLM's own renderer: template, placeholders, and the images' pixels.

The renderer's cache that both of vLLM's processes share is not used (`skip_mm_cache`): vLLM counts an image as sent
once it was rendered, and its engine core would die over a later row with the same image if the first row was refused
between the two. Images are told apart by a hash of their bytes, so equal images share their part of the prefix cache.
"""

from __future__ import annotations

from typing import Any

from batchinfer.core.errors import RowError
from batchinfer.core.records import Media, Request
from batchinfer.engines.vllm_requests import first_line

_RESERVED = frozenset(
    {"chat_template", "tokenize", "conversation", "messages", "return_dict", "return_tensors"}
)
"""Arguments of transformers' `apply_chat_template` that a run or a request must not set."""


def prompt_with_images(engine: Any, request: Request) -> Any:
    """Return what vLLM's `add_request` takes for a request with images.

    Args:
        engine: vLLM's LLMEngine.
        request: The request. It has `media`.

    Raises:
        RowError: the model takes no images, or the prompt has not one place for each image.
        Exception: of any class: vLLM or the model's processor refuses the prompt.
    """
    model = engine.vllm_config.model_config
    if not model.is_multimodal_model:
        raise RowError("engine_rejected", "the model takes no images")
    media = request.media or []
    images = [_pixels(each) for each in media]
    try:
        if request.messages is not None:
            return _render_chat(engine.renderer, request, images)
        return _render_text(engine, request, images)
    except (AssertionError, IndexError, KeyError) as error:
        # Processors of some models use assertions where placeholders and images do not fit together.
        raise RowError(
            "media_mismatch",
            f"the prompt has not one place for each of its {len(media)} images ({first_line(error)})",
        ) from error


def _pixels(media: Media) -> Any:
    """Decode an image as vLLM does: turned as the camera was held, transparent parts white."""
    from vllm.multimodal.media import ImageMediaIO

    try:
        loaded = ImageMediaIO().load_bytes(media.data)
    except Exception as error:  # decoders raise errors of many types
        raise RowError(
            "invalid_media", f"vLLM cannot decode an image: {first_line(error)}"
        ) from error
    return getattr(loaded, "media", loaded)


def _render_chat(renderer: Any, request: Request, images: list[Any]) -> Any:
    from vllm.renderers import ChatParams

    options = request.chat_options or {}
    given = options.get("chat_template_kwargs") or {}
    kwargs = {name: value for name, value in given.items() if name not in _RESERVED}
    continues = bool(options.get("continue_final_message"))
    params = ChatParams(
        chat_template=options.get("chat_template"),
        chat_template_content_format="auto",
        chat_template_kwargs=kwargs
        | {"add_generation_prompt": not continues, "continue_final_message": continues},
    )
    media = request.media or []
    waiting = zip(images, media, strict=True)
    messages = [
        message
        if not isinstance(message["content"], list)
        else {**message, "content": [_filled(part, waiting) for part in message["content"]]}
        for message in request.messages or []
    ]
    _, prompts = renderer.render_chat([messages], params, skip_mm_cache=True)
    return prompts[0]


def _filled(part: dict[str, Any], waiting: Any) -> dict[str, Any]:
    if part["type"] != "image":
        return part
    image, media = next(waiting)
    return {"type": "image_pil", "image_pil": image, "uuid": media.digest}


def _render_text(engine: Any, request: Request, images: list[Any]) -> Any:
    from vllm.renderers.inputs.preprocess import parse_model_prompt

    prompt: dict[str, Any] = {
        "multi_modal_data": {"image": images},
        "multi_modal_uuids": {"image": [each.digest for each in request.media or []]},
    }
    if request.token_ids is not None:
        prompt["prompt_token_ids"] = request.token_ids
    else:
        prompt["prompt"] = request.text
    model = engine.vllm_config.model_config
    return engine.renderer.render_cmpl([parse_model_prompt(model, prompt)], skip_mm_cache=True)[0]
