"""Token families that are wrong in one way each; what they share is sound."""

import dataclasses
import json

from miles_core.errors import SessionError
from miles_core.kinds.tito_family import Delta
from miles_core.session.hermes import HermesParser, inline_calls, inline_tools, parse_tool_calls, spell_tool_calls
from miles_core.testing.tito_family import TitoFamilyConformance
from miles_core.types import Message, ToolCall


class Sound:
    """ChatML, written plainly."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.end = tokenizer.token_id("<|im_end|>")
        self.newline = tokenizer.encode("\n")
        self.stop_token_ids = frozenset({self.end})

    @classmethod
    def claims(cls, tokenizer):
        return True

    def text(self, messages):
        turns = (f"<|im_start|>{each.role}\n{each.content}<|im_end|>\n" for each in inline_calls(messages))
        return "".join(turns) + "<|im_start|>assistant\n"

    def render(self, messages, tools=()):
        return self.tokenizer.encode(self.text(inline_tools(messages, tools) if tools else messages))

    def append(self, stored, appended, tools=()):
        return self.tokenizer.encode(self.text(appended))

    def merge(self, prefix, suffix):
        row = list(prefix)
        if row[-1:] != [self.end]:
            raise SessionError("cut off")
        return row + self.newline + list(suffix)

    def spell(self, message, after=None):
        return spell_tool_calls(message.content, message.tool_calls)

    def parse(self, output_ids, tools=()):
        ids = list(output_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        content, calls = parse_tool_calls(self.tokenizer.decode(ids))
        return Message(role="assistant", content=content, tool_calls=calls)

    def stream_parser(self, tools=()):
        return Late(self) if type(self).parse is not Sound.parse else HermesParser(self.tokenizer, self.stop_token_ids)


class Late:
    """Streams what `parse` makes of the turn so far, so that a fault of `parse` is one of the stream too."""

    def __init__(self, family):
        self.family, self.ids, self.said = family, [], ""

    def feed(self, output_ids):
        self.ids += output_ids
        said = self.family.parse(self.ids).content.rstrip()
        if not said.isascii() or "<" in said:
            return []
        new, self.said = said[len(self.said) :], said
        return [Delta(content=new)]

    def finish(self):
        found = self.family.parse(self.ids)
        rest = found.content[len(self.said) :]
        return [Delta(content=rest, reasoning=found.reasoning or "", tool_calls=found.tool_calls)]


class Faulty(TitoFamilyConformance):
    def make(self, tokenizer):
        return self.family(tokenizer)

    def spell_call(self, name, arguments):
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CHECK = "test_it_holds_on_every_conversation_of_miles_tito_check"
TURN_BY_TURN = "test_a_row_built_turn_by_turn_is_the_row_rendered_at_once"


class TestTokenizesThePrefixAgain(Faulty):
    class family(Sound):
        def merge(self, prefix, suffix):
            return super().merge(self.tokenizer.encode(self.tokenizer.decode(prefix)), suffix)

    caught_by = {
        "test_sampled_tokens_are_never_encoded_again": "the sampled prefix after merge differs",
        "test_only_appended_messages_are_encoded": "after a long history",
    }


class TestForgetsTheSeparator(Faulty):
    class family(Sound):
        def merge(self, prefix, suffix):
            super().merge(prefix, suffix)
            return [*prefix, *suffix]

    caught_by = {CHECK: "users in turn", TURN_BY_TURN: "differs from token"}


class TestDuplicatesTheSeparator(Faulty):
    class family(Sound):
        def append(self, stored, appended, tools=()):
            return self.newline + super().append(stored, appended, tools)

    caught_by = {CHECK: "users in turn", TURN_BY_TURN: "differs from token"}


class TestForgetsTheOpener(Faulty):
    class family(Sound):
        def append(self, stored, appended, tools=()):
            text = self.text(appended).removesuffix("<|im_start|>assistant\n")
            return self.tokenizer.encode(text)

    caught_by = {CHECK: "users in turn", TURN_BY_TURN: "differs from token"}


class TestClosesACutTurn(Faulty):
    class family(Sound):
        def merge(self, prefix, suffix):
            row = list(prefix)
            return super().merge(row if row[-1:] == [self.end] else [*row, self.end], suffix)

    caught_by = {
        CHECK: "went on after a turn that was cut off",
        "test_a_turn_without_its_end_is_not_closed_silently": "went on after a turn that was cut off",
    }


class TestEncodesTheHistoryToFindTheSuffix(Faulty):
    class family(Sound):
        def append(self, stored, appended, tools=()):
            before = self.text(stored).removesuffix("<|im_start|>assistant\n")
            row, whole = self.tokenizer.encode(before), self.tokenizer.encode(self.text([*stored, *appended]))
            return whole[len(row) :]

    caught_by = {"test_only_appended_messages_are_encoded": "after a long history"}


class TestAddsADefaultSystemPromptEveryTime(Faulty):
    class family(Sound):
        def text(self, messages):
            if messages[0].role != "system":
                messages = [Message(role="system", content="Be kind."), *messages]
            return super().text(messages)

    caught_by = {CHECK: "users in turn", TURN_BY_TURN: "differs from token"}


class TestDropsTools(Faulty):
    class family(Sound):
        def render(self, messages, tools=()):
            return super().render(messages)

    caught_by = {CHECK: "is not in the row", "test_tools_do_not_vanish": "does not show them"}


class TestStripsText(Faulty):
    class family(Sound):
        def parse(self, output_ids, tools=()):
            found = super().parse(output_ids)
            return dataclasses.replace(found, content=found.content.strip())

    caught_by = {"test_plain_text_comes_back": "came back as"}


class TestKeepsTheStopTokenInTheText(Faulty):
    class family(Sound):
        def parse(self, output_ids, tools=()):
            content, calls = parse_tool_calls(self.tokenizer.decode(output_ids))
            return Message(role="assistant", content=content, tool_calls=calls)

    caught_by = {
        CHECK: "one turn",
        "test_plain_text_comes_back": "came back as",
        "test_broken_tool_calls_stay_in_the_content": "was read as",
    }


class TestRespellsArguments(Faulty):
    class family(Sound):
        def parse(self, output_ids, tools=()):
            found = super().parse(output_ids)
            calls = tuple(
                ToolCall(id=call.id, name=call.name, arguments=json.dumps(json.loads(call.arguments)))
                for call in found.tool_calls
            )
            return dataclasses.replace(found, tool_calls=calls)

    caught_by = {CHECK: "arguments with line breaks", "test_tool_calls_are_read_to_the_character": "was read as"}


class TestRaisesOnBrokenCalls(Faulty):
    class family(Sound):
        def parse(self, output_ids, tools=()):
            found = super().parse(output_ids)
            _, opened, rest = found.content.partition("<tool_call>")
            if opened:
                json.loads(rest.partition("</tool_call>")[0])
            return found

    # Noise may spell an opening tag too, so parsing at large fails with it.
    caught_by = {
        CHECK: "JSONDecodeError",
        "test_broken_tool_calls_stay_in_the_content": "JSONDecodeError",
        "test_parsing_never_raises": "JSONDecodeError",
        "test_what_is_streamed_is_what_is_parsed": "JSONDecodeError",
    }


class TestKeepsState(Faulty):
    class family(Sound):
        def render(self, messages, tools=()):
            self.newline = self.newline if messages[-1].role != "user" or len(messages) < 4 else [*self.newline] * 2
            return super().render(messages, tools)

    caught_by = {
        CHECK: "users in turn",
        "test_a_row_depends_on_its_arguments_alone": "another row the second time",
    }


class TestChangesThePrefix(Faulty):
    class family(Sound):
        def merge(self, prefix, suffix):
            merged = super().merge(prefix, suffix)
            prefix[:] = merged
            return merged

    caught_by = {"test_a_row_depends_on_its_arguments_alone": "SessionError"}


class TestHasNoStopToken(Faulty):
    class family(Sound):
        def __init__(self, tokenizer):
            super().__init__(tokenizer)
            self.stop_token_ids = frozenset({tokenizer.vocab_size + 7})

        def parse(self, output_ids, tools=()):
            ids = [index for index in output_ids if index != self.end]
            return super().parse(ids)

    caught_by = {
        CHECK: "users in turn",
        "test_stop_tokens_are_tokens": "without a token",
        **dict.fromkeys(
            (
                TURN_BY_TURN,
                "test_sampled_tokens_are_never_encoded_again",
                "test_only_appended_messages_are_encoded",
                "test_a_row_depends_on_its_arguments_alone",
                "test_a_seam_is_made_from_the_end_of_the_row",
                "test_plain_text_comes_back",
                "test_what_is_streamed_is_what_is_parsed",
                "test_tool_calls_are_read_to_the_character",
                "test_broken_tool_calls_stay_in_the_content",
            ),
            "no stop token occurs in a rendered conversation",
        ),
    }


class TestClaimsWithTheTokenItself(Faulty):
    class family(Sound):
        @classmethod
        def claims(cls, tokenizer):
            return tokenizer.token_id("<|im_end|>")

    caught_by = {"test_a_claim_is_a_bool": "a int"}


class TestStreamsTagsAsText(Faulty):
    class family(Sound):
        def stream_parser(self, tools=()):
            parser, text = HermesParser(self.tokenizer, self.stop_token_ids), self.tokenizer.text_stream()
            parser.feed = lambda ids: [Delta(content=text.push(ids))]
            parser.finish = lambda: [Delta(content=text.flush())]
            return parser

    caught_by = {CHECK: "pieces of 1", "test_what_is_streamed_is_what_is_parsed": "was streamed as"}


class TestStreamsBytesOfHalfACharacter(Faulty):
    class family(Sound):
        def stream_parser(self, tools=()):
            parser = HermesParser(self.tokenizer, self.stop_token_ids)
            parser._text.push = self.tokenizer.decode
            return parser

    caught_by = {CHECK: "pieces of 1", "test_what_is_streamed_is_what_is_parsed": "was streamed as"}


class TestStreamsNothingBeforeTheEnd(Faulty):
    class family(Sound):
        def stream_parser(self, tools=()):
            late = Late(self)
            late.feed = lambda ids: late.ids.extend(ids) or []
            return late

    caught_by = {"test_text_is_streamed_while_it_is_sampled": "gave out nothing"}


class TestLooksAtTheWholeRow(Faulty):
    class family(Sound):
        def merge(self, prefix, suffix):
            merged = super().merge(prefix, suffix)
            return merged if len(prefix) < 200 else [*merged[: len(prefix)], *self.newline, *merged[len(prefix) :]]

    caught_by = {
        CHECK: "tool loop",
        "test_a_seam_is_made_from_the_end_of_the_row": "differs from token",
    }
