"""A simulated agent for tests/research_trainer.py: reads the prompt, makes one random edit, says what it did.

    python tests/research_agent.py [EDIT ...]      # such as gain=0.01 behaviour=crash other touch; default: at random
"""
import random
import re
import sys
from pathlib import Path


def main():
    script, prompt = Path("train_gpt.py"), sys.stdin.read()
    assert "experiments" in prompt and "train_gpt.py" in prompt
    source, edits = script.read_text(), dict(word.partition("=")[::2] for word in sys.argv[1:])
    if not edits:
        edits = {"gain": random.choice(["0", "0", "0.01", "-0.01"]),
                 "behaviour": random.choice(["fine"] * 7 + ["crash", "nan", "oversize", "debris"])}
    if "gain" in edits:
        level = float(re.search(r"(?m)^LEVEL = (.*)", source)[1]) - float(edits["gain"])
        source = re.sub(r"(?m)^LEVEL = .*", f"LEVEL = {level:.5f}", source)
    if "behaviour" in edits:
        source = re.sub(r"(?m)^BEHAVIOUR = .*", f"BEHAVIOUR = {edits['behaviour']!r}", source)
    if "metric" in edits:
        source = source.replace("return LEVEL", "return 0.5 * LEVEL")
    if "other" in edits:
        Path("helper.py").write_text("CHANGED = True\n")
    if "same" not in edits:
        source += f"# {random.random()}\n"
    script.write_text(source)
    print("thinking aloud\n" + " ".join(f"{name} {value}".strip() for name, value in edits.items()))


if __name__ == "__main__":
    main()
