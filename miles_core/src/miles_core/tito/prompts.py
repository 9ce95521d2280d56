"""How tools are described to models of several makers, as they were trained on it; ``{tools}`` is the list."""

TAGGED_TOOLS = """\
# Tools

You have access to the following functions:

<tools>{tools}
</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within \
<tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT \
after
- If there is no function call available, answer the question like normal with your current knowledge and do not \
tell the user about function calls
</IMPORTANT>"""
"""Qwen3.5 and Nemotron 3."""
