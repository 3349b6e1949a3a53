"""Typed bodies: decode a body to an instance of a handler's model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import msgspec

from lisa.core.model.envelope import Envelope
from lisa.core.model.errors import ConfigError, InvalidMessage

Reader = Callable[[Envelope], Any]


class BodyMismatch(InvalidMessage):
    """A body does not match its handler's model."""


def reader_for(model: Any) -> Reader:
    """Return a function that decodes a body to `model`, or raises BodyMismatch with the reason.

    A model is a msgspec Struct, dataclass, TypedDict, pydantic model or any type that msgspec
    supports. JSON bodies are decoded; text and bytes bodies are converted from `str` and `bytes`.
    Raises ConfigError if `model` is not supported.
    """
    if hasattr(model, "__pydantic_core_schema__") or hasattr(model, "__get_pydantic_core_schema__"):
        return _pydantic(model)
    try:
        decoder = msgspec.json.Decoder(model)
    except TypeError as error:
        raise ConfigError(f"{_name(model)} cannot be a model: {error}") from None

    def read(envelope: Envelope) -> Any:
        try:
            if envelope.kind == "j":
                return decoder.decode(envelope.body)
            return msgspec.convert(_plain(envelope), model)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BodyMismatch(f"the body does not match {_name(model)}: {error}") from None

    return read


def _pydantic(model: Any) -> Reader:
    from pydantic import TypeAdapter, ValidationError

    adapter: TypeAdapter[Any] = TypeAdapter(model)
    # A producer writes a model by its fields' names, other programs by their aliases.
    has_names = "by_name" in inspect.signature(adapter.validate_json).parameters  # pydantic 2.11
    names: dict[str, Any] = {"by_alias": True, "by_name": True} if has_names else {}

    def read(envelope: Envelope) -> Any:
        try:
            if envelope.kind == "j":
                return adapter.validate_json(envelope.body, **names)
            return adapter.validate_python(_plain(envelope))
        except ValidationError as error:
            faults = error.errors(include_url=False, include_input=False)
            reasons = "; ".join(
                f"{'.'.join(map(str, fault['loc'])) or 'body'}: {fault['msg']}" for fault in faults
            )
            raise BodyMismatch(f"the body does not match {_name(model)}: {reasons}") from None
        except UnicodeDecodeError as error:
            raise BodyMismatch(f"the body does not match {_name(model)}: {error}") from None

    return read


def _plain(envelope: Envelope) -> str | bytes:
    return envelope.body.decode() if envelope.kind == "s" else envelope.body


def _name(model: Any) -> str:
    return model.__name__ if inspect.isclass(model) else str(model)
