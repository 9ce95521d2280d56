"""How tools are described to the models, as they were trained on it; ``{tools}`` is the list."""

HERMES_TOOLS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""

CODER_TOOLS = """\


# Tools

You have access to the following tools:

<tools>{tools}
</tools>

If you choose to call a tool ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
value_2
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: the tool calling block MUST begin with an opening <tool_call> tag \
and end with a closing </tool_call> tag.
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT \
after
- If there is no function call available, answer the question like normal with your current knowledge and do not \
tell the user about function calls
</IMPORTANT>"""

CODER_SYSTEM = "You are Qwen, a helpful AI assistant that can interact with a computer to solve tasks."
