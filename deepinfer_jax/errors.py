"""Errors of the package: one sentence, or a heading with every fault that was found."""

from collections.abc import Iterable

_SHOWN = 50


class DeepInferError(Exception):
    """Base of every error that this package raises on purpose.

    Args:
        message: One sentence that names the field, tensor or line, what was found and what was expected.
        faults: The single faults, when several are reported together. All are kept in `faults`;
            the text shows the first 50.
    """

    def __init__(self, message: str, faults: Iterable[str] = ()):
        self.message = message
        self.faults = tuple(faults)
        super().__init__(message, self.faults)

    def __str__(self) -> str:
        if not self.faults:
            return self.message
        count = len(self.faults)
        lines = [f"{self.message} ({count} fault{'s' if count != 1 else ''})"]
        lines += [f"  - {fault}" for fault in self.faults[:_SHOWN]]
        if count > _SHOWN:
            lines.append(f"  ... and {count - _SHOWN} more")
        return "\n".join(lines)


class ConfigError(DeepInferError):
    """A configuration that is incomplete, inconsistent or not supported."""


class CheckpointError(DeepInferError):
    """Files that are not the checkpoint that the configuration describes."""


class CacheError(DeepInferError):
    """A cache that is full, or a saved one that does not fit this model."""


class ImageError(DeepInferError):
    """An image that cannot be read or planned."""


class TokenizerError(DeepInferError):
    """A tokenizer that is missing, unreadable, or not the one of this model."""


class InputError(DeepInferError):
    """An argument of a call that does not make sense."""
