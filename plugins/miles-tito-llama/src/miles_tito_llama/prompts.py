"""How tools are described to the models, as they were trained on it."""

HAVE_TOOLS = (
    "You have access to the following functions. To call a function, please respond with JSON for a function call."
)

IN_USER = (
    "Given the following functions, please respond with a JSON for a function call "
    "with its proper arguments that best answers the given prompt.\n\n"
)

FORM = (
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    "Do not use variables.\n\n"
)
