"""What is said at the end of a run: held-out loss beside the entropy of single tokens, a sample, where things are."""

from collections import Counter

import numpy as np

from lf.data.hf_tokenizer import read_tokenizer
from lf.data.source import Rows
from lf.models.generate import Sampling, generate
from lf.models.spec import IGNORE
from lf.train.folder import ADAPTER, HF, METRICS, TOKENIZER
from lf.train.loop import Ended, Job

PROMPT, SAMPLE = 24, 60
"""Most tokens of the prompt, and of its continuation."""


def unigram_entropy(rows: Rows, count: int) -> float:
    """Returns the entropy, in nats, of the trained tokens of the first `count` rows of epoch 0, each taken alone.

    It is the loss of the best model that does not look at the context, fitted to these very tokens.
    """
    counts: Counter[int] = Counter()
    for index in range(count):
        labels = np.asarray(rows.row(0, index)["labels"])
        values, numbers = np.unique(labels[labels != IGNORE], return_counts=True)
        counts.update(dict(zip(values.tolist(), numbers.tolist(), strict=True)))
    share = np.array(list(counts.values())) / sum(counts.values())
    return float(-(share * np.log(share)).sum())


def sample(job: Job, ended: Ended) -> tuple[str, str] | None:
    """Returns the start of a held-out (or training) row and the model's greedy continuation of it.

    None where the rows are no text or begin with pictures, or where the model is spread over several ranks.
    """
    folder = job.folder / TOKENIZER
    if not folder.is_dir() or job.comm.world > 1:
        return None
    tokenizer = read_tokenizer(folder)
    row = (job.eval_rows or job.rows).row(0, 0)
    if "tokens" not in row or row.get("media"):
        return None
    length = job.rows.describe().get("length", PROMPT)
    prompt = [int(i) for i in row["tokens"][: min(PROMPT, row["lengths"][0], max(1, length // 2))]]
    model = getattr(ended.state.chunks[0], "module", ended.state.chunks[0])
    how = Sampling(tokens=SAMPLE)
    ids = list(generate(job.model, model, prompt, how, eos=tokenizer.eos, device=job.device.torch_type))
    return tokenizer.decode(prompt), tokenizer.decode(ids)


def summary(job: Job, ended: Ended) -> str:
    """Returns the closing lines of a run."""
    lines = []
    if ended.eval_loss is not None and job.eval_rows is not None:
        loss = f"held-out loss {ended.eval_loss:.3f}"
        if "labels" in job.eval_rows.row(0, 0):
            scored = job.run.eval.batches * job.run.batch or len(job.eval_rows)
            entropy = unigram_entropy(job.eval_rows, min(scored, len(job.eval_rows)))
            loss += f" nats a token; entropy of single tokens {entropy:.3f}"
        lines.append(loss)
    text = sample(job, ended)
    if text is not None:
        lines += [f"sample, after the prompt {text[0]!r}:", text[1]]
    elif job.comm.world > 1 and (job.folder / TOKENIZER).is_dir() and "tokens" in job.rows.row(0, 0):
        lines.append(f"no sample from {job.comm.world} ranks; scripts/generate.py {job.folder} writes one")
    return "\n".join(lines)


def close(job: Job, ended: Ended) -> None:
    """Says and draws on rank 0 what a finished run has come to.

    The run is done and saved: what is shown of it can fail without making it a failure.
    """
    from lf.train.plot import plot_runs

    if job.comm.rank:
        return
    left = [METRICS, "checkpoints/", *(f"{name}/" for name in (HF, ADAPTER) if (job.folder / name).is_dir())]
    try:
        text = summary(job, ended)
        if text:
            job.say(text)
    except (ValueError, OSError, RuntimeError) as error:
        job.say(f"no summary: {error}")
    try:
        plot_runs([job.folder], job.folder / "loss.png")
        left.append("loss.png")
    except (ValueError, OSError, RuntimeError) as error:
        job.say(f"no loss.png: {error}")
    job.say(f"run folder {job.folder}: {', '.join(left)}")
