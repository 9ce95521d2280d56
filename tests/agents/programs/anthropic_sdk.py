"""The official Anthropic SDK: a tool loop, the last turn streamed."""

import sys

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
LOOK = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"where": {"type": "string"}}},
}
messages = [{"role": "user", "content": "What is in the box?"}]
known = {"model": "policy", "max_tokens": 200, "system": "Use tools.", "tools": [LOOK]}
reply = client.messages.create(messages=messages, **known)
text = "".join(block.text for block in reply.content if block.type == "text")
while reply.stop_reason == "tool_use":
    messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": f"{block.input.get('where')}: a ball"}
        for block in reply.content
        if block.type == "tool_use"
    ]
    messages.append({"role": "user", "content": results})
    with client.messages.stream(messages=messages, **known) as stream:
        text = "".join(stream.text_stream)
        reply = stream.get_final_message()
print(text)
