from bench.program import Absent
NAMES = ("transformers", "torch_graph")
def decode_transformers(model, prompts, new_tokens, repeats=3):
    return Absent("transformers", "not yet")
def decode_torch_graph(model, state, new_tokens, repeats=3):
    return Absent("torch_graph", "not yet")
