"""open_guide: from a request with a guide to where its answer stands in it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from legato.worker.services.errors import wrong_guide

if TYPE_CHECKING:
    from collections.abc import Iterable

    from legato.text.guide_book import GuideBook
    from legato.text.guide_matcher import GuideMatcher
    from legato.worker.sampling_params import SamplingParams
    from legato.worker.sequence import Sequence


async def open_guide(book: GuideBook, params: SamplingParams, eos: Iterable[int]) -> None:
    """Whether the guide is one that this worker can serve, if there is one. Compiling is done in a
    thread.

    Raises:
        CallError: naming the field and what is wrong with it.
    """
    if params.guide is not None:
        await asyncio.to_thread(_opened, book, params, eos)


async def follow_guide(book: GuideBook, sequences: Iterable[Sequence]) -> None:
    """Gives each sequence its matcher, fed with what was emitted, where there is a guide.

    Raises:
        CallError: as `open_guide`, or what was emitted does not keep to it.
    """
    for sequence in sequences:
        if sequence.params.guide is not None:
            sequence.guide = await asyncio.to_thread(
                _opened, book, sequence.params, sequence.eos_token_ids, sequence.output_token_ids
            )


def _opened(
    book: GuideBook, params: SamplingParams, eos: Iterable[int], emitted: Iterable[int] = ()
) -> GuideMatcher:
    assert params.guide is not None, "there is nothing to open"
    try:
        matcher = book.open(
            params.guide,
            eos_token_ids=eos,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
        )
        matcher.advance(list(emitted))
    except ValueError as error:
        raise wrong_guide(str(error)) from None
    return matcher
