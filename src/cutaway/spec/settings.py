"""What a checkpoint says about generating with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """Defaults that a call's own arguments override.

    "The text" is what the decoder holds: prompt and answer, or an encoder–decoder's start token and answer.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 keeps every token.
        top_p: 1 keeps every token.
        eos_ids: tokens that end an answer: the union of what config, generation config and tokenizer name.
        min_p: 0 keeps every token.
        repetition_penalty: 1 is none.
        num_beams: 1 is no beam search.
        length_penalty: the power of an answer's length that its log-probability is divided by.
        early_stopping: when beams end: True, False or ``"never"``.
        renormalize: whether beams add up log-probabilities that were made to sum to one again after the rules.
        min_length: no end token before the text has so many tokens.
        min_new_tokens: no end token before the answer has so many.
        max_length: most tokens of an encoder–decoder's text, where a call says no length. None for a decoder
            alone, whose texts begin with a prompt of any length.
        max_new_tokens: most tokens of an answer, where a call says no length.
        no_repeat_ngram_size: no sequence of so many tokens comes twice in the text; 0 for no such rule.
        bad_words_ids: sequences that are never produced.
        suppress_ids, begin_suppress_ids: tokens never produced; not produced first.
        forced_bos_id: the token after a prompt of one.
        forced_eos_ids: what the last token is chosen from where the length runs out.
        decoder_start_id: what an encoder–decoder's text starts with.
        pad_id: fills up batches elsewhere.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    eos_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    renormalize: bool = False
    min_length: int = 0
    min_new_tokens: int = 0
    max_length: int | None = None
    max_new_tokens: int | None = None
    no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    suppress_ids: tuple[int, ...] = ()
    begin_suppress_ids: tuple[int, ...] = ()
    forced_bos_id: int | None = None
    forced_eos_ids: tuple[int, ...] = ()
    decoder_start_id: int | None = None
    pad_id: int | None = None
