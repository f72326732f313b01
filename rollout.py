"""
Sampling: n completions for each of many prompts, at the speed of an engine, in one file.

The paged KV cache, continuous batching and CUDA graphs, around the decode pass and the draw of a token, which
are model.py's. Nothing here knows about rewards or gradients.

    python rollout.py --model=FOLDER --prompt="What is 17 * 23?"

How a rollout runs, from the inside out:

1. `Sampler._step` is one decode step for B rows, wholly on the device: current tokens in; next tokens,
   their log-probs and the stop test out. It touches tensors of fixed address only, so on a GPU it is
   captured in a CUDA graph, one for each batch size, and replayed. On a CPU the same function runs eagerly.
2. The host launches some steps (STEPS_PER_LOOK), then *looks*: it waits for them, harvests the tokens, frees
   the pages of what has finished, reserves pages for the next steps, admits waiting sequences into free rows
   (prefill) and uploads who sits in which row. A row may change hands at every look; so, as a rollout
   drains, what is left simply moves together into a smaller graph.
3. A prompt without its last token is prefilled by the packed training pass, once for its n samples. The
   last prompt token is the first current token: the first sampled token comes out of the same step as all
   others.

None of this may show in the result. By the numerics contract (fp8.py) a log-probability depends on the
tokens before it alone, and the noise of a sample on (seed, key, position) alone: rows, order, batch size,
preemption, page sharing and graphs change no bit of tokens, log-probs or pages. There is no top-k or top-p:
what is sampled is what the trainer scores.

Shapes: B rows of a step, P pages of the pool, L layers, T packed tokens, V vocabulary.
"""

import argparse
import difflib
import itertools
import math
import sys
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from fp8 import (cdiv, jit, launch, overlapped, round_up, start_next, tl, triton, use_kernels,
                 wait_for_inputs)
from model import KV_TYPES, PAGE, PRECISIONS, SPLIT, Config, Tokenizer, Transformer, folder_from_name, sample

STEPS_PER_LOOK = {"cuda": 16, "cpu": 4}   # decode steps: a finished row idles for half of them on average
PREFILL_TOKENS = 16384    # packed tokens of one prefill call; only a longer single sequence exceeds it
GROWTH_PAGES = 2          # free pages left to each running sequence when another one is admitted
BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512)   # rows of the graphs: a capture each, and idle rows cost little
MAX_SAMPLES = 2**16       # completions of one prompt
QUIET_SECONDS = 10        # between two lines of progress, so shorter rollouts show none
MAX_SLOTS = {"cuda": 512, "cpu": 64}          # the CPU reference multiplies blocks of 64 rows, full or not


@dataclass
class Rollout:
    """What `Sampler.generate` returns: one entry per completion, the n completions of a prompt side by side.

    tokens      lists of ids, the stop id included (it is an action: scored and trained like any other)
    logprobs    FP32 CPU tensors, log p(token) at the sampling temperature (greedy: at temperature 1)
    finish      "stop" (the last token is a stop id, even if it is the last one allowed) or "length"
    occupancy   mean share of the slots that held a running sequence, over all decode steps
    """
    tokens: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    finish: list = field(default_factory=list)
    seconds: float = 0.0
    n_tokens: int = 0
    steps: int = 0
    occupancy: float = 0.0
    prefill_tokens: int = 0
    preemptions: int = 0

    @property
    def tok_per_s(self):
        return self.n_tokens / max(self.seconds, 1e-9)


def in_batches(items, size, budget):
    """Splits items, in order, into lists of up to `budget` by the sum of their sizes, or of one item."""
    batch, used = [], 0
    for item in items:
        if batch and used + size(item) > budget:
            yield batch
            batch, used = [], 0
        batch.append(item)
        used += size(item)
    if batch:
        yield batch


# ---- pages -----------------------------------------------------------------------------------------------

def pages_for(positions):
    """Number of pages that hold so many positions."""
    return cdiv(positions, PAGE)


class PagePool:
    """The KV cache: P pages of PAGE positions, handed out by number, with reference counts.

    A page number means the same page in all L layers: caches[l] holds that layer's tensors, whose first
    dimension is P. A page is one tile of the attention kernel, so paging cannot change the order of its sums.
    Page 0 belongs to nobody: rows without a running sequence write there. A page that changes hands keeps its
    old content; attention masks it.
    """

    def __init__(self, model, pages):
        self.caches = model.new_caches(pages)
        self.capacity = pages - 1
        self.reset()

    def reset(self):
        """Forgets all sequences. Every `generate` starts so: nothing computed with older weights survives
        it, and no NaN, which masked attention would still multiply by 0."""
        for pages in itertools.chain(*self.caches):
            pages.zero_()
        self.references = [0] * (self.capacity + 1)
        self.free_pages = list(range(self.capacity, 0, -1))       # a stack, low numbers on top

    @property
    def free(self):
        return len(self.free_pages)

    def take(self, count):
        pages = [self.free_pages.pop() for _ in range(count)]
        for page in pages:
            self.references[page] = 1
        return pages

    def share(self, pages):
        for page in pages:
            self.references[page] += 1
        return list(pages)

    def release(self, pages):
        for page in pages:
            self.references[page] -= 1
            if self.references[page] == 0:
                self.free_pages.append(page)

    def copy(self, pairs):
        """Copies whole pages, [(source, destination), ...], in every layer."""
        source, destination = torch.tensor(pairs, device=self.caches[0][0].device).unbind(1)
        for pages in itertools.chain(*self.caches):
            pages[destination] = pages[source]


def free_memory(device):
    """Bytes that can still be allocated there; a CPU's are not counted."""
    if device.type != "cuda":
        return sys.maxsize
    torch.cuda.empty_cache()                         # what the trainer freed counts as free
    return torch.cuda.mem_get_info(device)[0]


@dataclass(eq=False)
class _Prefix:
    """Tokens to prefill: a prompt, or what a preempted sequence had, always without the last token."""
    tokens: list
    waiting: int          # sequences in the queue that will start from it
    pages: list = None    # held for them, once filled


@dataclass(eq=False)
class _Sequence:
    """One completion on its way. Positions count from the first prompt token."""
    index: int            # place in the result
    prompt: list
    prefix: _Prefix
    key: int              # names the completion for the noise
    limit: int            # max_new_tokens
    tokens: np.ndarray    # (limit,) int32, of which `count` are generated
    logprobs: np.ndarray  # (limit,) FP32
    count: int = 0
    pages: list = None    # None while it waits
    row: int = -1
    age: int = -1         # number of its admission: the largest is the youngest

    @property
    def position(self):   # of the current token, which the next step feeds
        return len(self.prompt) + self.count - 1

    @property
    def end(self):        # first position that is never fed: the last token is sampled at end - 1
        return len(self.prompt) + self.limit - 1

    @property
    def current(self):
        return int(self.tokens[self.count - 1]) if self.count else self.prompt[-1]

    def span(self, steps):     # pages up to the last position that so many steps can write
        return pages_for(min(self.position + steps, self.end))

    @property
    def growth(self):     # free pages it is granted before another sequence may start, to preempt seldom
        return min(pages_for(self.end) - len(self.pages), GROWTH_PAGES)


# ---- the end of a decode step ----------------------------------------------------------------------------

def advance_reference(token, logprob, ids, spans, table, is_stop, out):
    B = len(token)
    (current, _, slot, count), (position, length, end) = ids[:, :B], spans[:, :B]
    running = length > 0
    # The FP32 bits travel beside the ids in one int32 buffer, so that the host fetches all in one copy.
    record = torch.stack([torch.where(running, token, -1).int(), logprob.view(torch.int32)])
    out[:, :, :B].index_copy_(0, count[:1], record[None])
    current.copy_(torch.where(running, token, current))
    position += running
    more = running & (position < end) & ~is_stop[token]
    length.copy_(torch.where(more, position + 1, 0))                   # the token counts that is fed next
    at = torch.where(more, position, 0)
    page = table[:B].gather(1, (at // PAGE)[:, None].long())[:, 0]
    slot.copy_(torch.where(more, page * PAGE + at % PAGE, 0))
    ids[3, 0] += 1


@jit(do_not_specialize=["B"])
def advance_kernel(tokens, logprobs, ids, spans, table, is_stop, out, B,
                   ROWS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """All rows in one program: as twenty operations of torch this takes a tenth of a small model's step."""
    row = tl.arange(0, BLOCK)
    used = row < B
    start_next()
    wait_for_inputs()
    token, logprob = tl.load(tokens + row, mask=used, other=0), tl.load(logprobs + row, mask=used, other=0)
    count, position = tl.load(ids + 3 * ROWS), tl.load(spans + row, mask=used, other=0)
    running = tl.load(spans + ROWS + row, mask=used, other=0) > 0
    end = tl.load(spans + 2 * ROWS + row, mask=used, other=0)
    out += count * 2 * ROWS + row
    tl.store(out, tl.where(running, token, -1).to(tl.int32), mask=used)
    tl.store(out + ROWS, logprob.to(tl.int32, bitcast=True), mask=used)
    position += running.to(tl.int32)
    more = running & (position < end) & (tl.load(is_stop + token, mask=used, other=0) == 0)
    page = tl.load(table + row * WIDTH + position // PAGE, mask=more, other=0)
    slot = tl.where(more, page * PAGE + position % PAGE, 0)
    tl.store(ids + row, token, mask=running)
    tl.store(ids + 2 * ROWS + row, slot.to(tl.int64), mask=used)
    tl.store(spans + row, position, mask=used)
    tl.store(spans + ROWS + row, tl.where(more, position + 1, 0), mask=used)
    tl.debug_barrier()                               # every thread has read the count
    tl.store(ids + 3 * ROWS, count + 1)


def advance(token, logprob, ids, spans, table, is_stop, out):
    """Records token and logprob (B,) of the running rows, moves these on, stops those at an end.
    The others are the sampler's own tensors, which `Sampler._build` describes; changed in place."""
    if not use_kernels(token):
        return advance_reference(token, logprob, ids, spans, table, is_stop, out)
    rows, width = table.shape
    launch(advance_kernel, 1, token, logprob, ids, spans, table, is_stop, out, len(token), rows, width, PAGE,
           triton.next_power_of_2(rows), num_warps=4, waits=True)


class Sampler:
    """Samples from a `Transformer`, whose weights may be rewritten in place between two calls of `generate`.

    Slots and pages follow from the request and from free memory, unless given: max_slots bounds the
    sequences that run at once, pages the KV pages. All is kept from call to call, until `release()` hands
    the memory back.
    """

    def __init__(self, model, max_slots=None, pages=None, verbose=False):
        self.model, self.device, self.verbose = model, model.head.data.device, verbose
        self.max_slots, self.max_pages = max_slots, pages
        self.steps_per_look = STEPS_PER_LOOK[self.device.type]
        refuse(self.device.type == "cuda" and self.device.index != torch.cuda.current_device(),
               f"the model is on {self.device}, which is not the current GPU: torch.cuda.set_device")
        self.slots, self.width, self.pool, self.graphs, self.told = 0, 0, None, {}, None

    # ---- one decode step: everything the device does -----------------------------------------------------

    def _step(self, B):
        """One token for the first B rows. All tensors have fixed addresses: a CUDA graph holds the whole.

        Rows without a running sequence have length 0: they go through the same arithmetic, write to page 0
        and change nothing. The host sees at its next look who has stopped.
        """
        current, keys, slot = self.ids[:3, :B]                         # (B,) int64 each
        position, length = self.spans[:2, :B]                          # (B,) int32 each
        with overlapped():
            hidden = self.model.decode(current, position, self.pool.caches, self.table[:B], length, slot)
            token, logprob = sample(hidden, self.model.head, self.inv_temp, self.noise, self.seed, keys,
                                    position)
            advance(token, logprob, self.ids, self.spans, self.table, self.is_stop, self.out)

    def _launch(self, steps):
        """Uploads the rows and starts so many decode steps, without waiting for them."""
        n = len(self.active)
        # The smallest batch size that holds all: rows 0..n-1 run, the rest of the B idles.
        B = next(b for b in BUCKETS + (self.slots,) if n <= b <= self.slots)
        step = self._graph(B).replay if self.device.type == "cuda" else lambda: self._step(B)
        position = np.array([s.position for s in self.active])
        self.host_ids[:] = self.host_spans[:] = 0    # the idle rows: length 0, slot 0; and the count of steps
        self.host_ids[:2, :n] = [s.current for s in self.active], [s.key for s in self.active]
        self.host_ids[2, :n] = self.host_table[range(n), position // PAGE] * PAGE + position % PAGE
        self.host_spans[:, :n] = position, position + 1, [s.end for s in self.active]
        for device, host in zip((self.ids, self.spans, self.table), self.uploads):
            device.copy_(host, non_blocking=True)    # pinned; the host writes there again after the next wait
        for _ in range(steps):
            step()

    def _graph(self, B):
        """The captured step of B rows. Weights, pages and rows are read by address: all may change."""
        if B not in self.graphs:
            self.spans.zero_()
            self.ids.zero_()
            self._step(B)                            # no row runs: compiles the kernels and changes nothing
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.graph_memory):
                self._step(B)
            self.graphs[B] = graph
        return self.graphs[B]

    # ---- one look: everything the host decides -----------------------------------------------------------

    def _harvest(self, steps):
        """Waits for the steps, appends their tokens to the sequences, vacates the rows of finished ones."""
        n = len(self.active)
        self.host_out.copy_(self.out, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()       # for the steps
        out = self.host_out.numpy()[:steps, :, :n]
        tokens, logprobs = out[:, 0], out[:, 1].view(np.float32)       # (steps, n)
        # NaN would pass through the loss and the next update in silence: stop at the look that sees it first.
        bad = np.argwhere((tokens >= 0) & ~np.isfinite(logprobs))
        if len(bad):
            step, row = bad[0]
            seq = self.active[row]
            raise FloatingPointError(
                f"completion {seq.index}: the log-prob of generated token {seq.count + step} is "
                f"{logprobs[step, row]}: the logits are not finite, check the weights")
        counts = (tokens >= 0).sum(0).tolist()
        for row in reversed(range(n)):               # from the end: the row that fills a gap has been seen
            seq, new = self.active[row], counts[row]
            seq.tokens[seq.count:seq.count + new] = tokens[:new, row]
            seq.logprobs[seq.count:seq.count + new] = logprobs[:new, row]
            seq.count += new
            if seq.current in self.stop or seq.count == seq.limit:
                self._vacate(seq)
        self.stats.n_tokens += sum(counts)
        self.stats.steps += steps

    def _vacate(self, seq):
        """Takes a sequence out of its row and returns its pages. The last row moves into the gap."""
        self.pool.release(seq.pages)
        seq.pages = None
        last = self.active.pop()
        if last is not seq:
            self.active[seq.row], last.row = last, seq.row
            self.host_table[seq.row] = self.host_table[len(self.active)]

    def _reserve(self):
        """Gives every row the pages of its next steps; if none is left, preempts the youngest sequence.

        That goes to the front of the queue and resumes from a prefill of all that it had, to the same page
        bits by the contract: only time is lost. The oldest one never goes, so there is always progress.
        """
        for seq in list(self.active):
            while seq.pages and (short := seq.span(self.steps_per_look) - len(seq.pages)) > 0:
                if self.pool.free >= short:
                    seq.pages += self.pool.take(short)
                    self.host_table[seq.row, :len(seq.pages)] = seq.pages
                elif self.shared:
                    self._drop_shared()
                else:
                    youngest = max(self.active, key=lambda s: s.age)
                    self._vacate(youngest)
                    had = youngest.prompt + youngest.tokens[:youngest.count].tolist()
                    youngest.prefix = _Prefix(had[:-1], waiting=1)
                    self.queue.appendleft(youngest)
                    self.stats.preemptions += 1

    def _drop_shared(self):
        """Returns the pages kept for samples that still wait; the next of them prefills the prompt again."""
        self.pool.release(self.shared.pages)
        self.shared.pages = self.shared = None

    def _admit(self):
        """Moves sequences from the queue into free rows while pages last, then prefills what is new.

        The samples of a prompt share its full pages. The last, partly filled page is copied for each, as
        each goes on writing there; the last sample takes it over instead. The queue is in order and a
        preempted sequence shares nothing, so at most one prompt (`self.shared`) has samples admitted and
        samples waiting.
        """
        # A prefill is hundreds of launches, however little it holds: wait for an eighth of the rows.
        batch = min(len(self.queue), max(1, self.slots // 8))
        if not self.queue or self.active and self.slots - len(self.active) < batch:
            return
        prefills, copies = [], []
        growth = sum(seq.growth for seq in self.active)
        while self.queue and len(self.active) < self.slots:
            seq = self.queue[0]
            prefix, filled = seq.prefix, len(seq.prefix.tokens)
            others = prefix.waiting > 1
            partial = int(others and filled % PAGE > 0)
            # What is not held for it yet; if that leaves the running ones no room to grow, it waits. An empty
            # sampler always has enough: by `_plan` the longest sequence fits beside one shared page.
            held = 0 if prefix.pages is None else pages_for(filled)
            need = seq.span(self.steps_per_look) + partial - held
            if need + growth > self.pool.free:
                if self.active or self.shared in (None, prefix):
                    break
                self._drop_shared()
                continue
            self.queue.popleft()
            if prefix.pages is None:
                prefix.pages = self.pool.take(pages_for(filled))
                prefills.append((prefix.tokens, list(prefix.pages)))
            if others:
                seq.pages = self.pool.share(prefix.pages[:filled // PAGE]) + self.pool.take(partial)
                if partial:
                    copies.append((prefix.pages[-1], seq.pages[-1]))
                self.shared = prefix
            else:
                seq.pages, prefix.pages = prefix.pages, None
                self.shared = None if self.shared is prefix else self.shared
            prefix.waiting -= 1
            seq.pages += self.pool.take(seq.span(self.steps_per_look) - len(seq.pages))
            seq.row, seq.age, self.admissions = len(self.active), self.admissions, self.admissions + 1
            self.active.append(seq)
            self.host_table[seq.row, :len(seq.pages)] = seq.pages
            growth += seq.growth
        self._prefill(prefills)
        if copies:
            self.pool.copy(copies)

    def _prefill(self, prefills):
        """Runs the trainer's pass over (tokens, pages) pairs, up to PREFILL_TOKENS tokens at a time."""
        prefills = [pair for pair in prefills if pair[0]]      # a prompt of one token has nothing to prefill
        for batch in in_batches(prefills, lambda pair: len(pair[0]), PREFILL_TOKENS):
            slots = [(np.array(pages)[:, None] * PAGE + np.arange(PAGE)).flat[:len(tokens)]
                     for tokens, pages in batch]
            lengths = [len(tokens) for tokens, _ in batch]
            tokens = torch.tensor(np.concatenate([tokens for tokens, _ in batch]), device=self.device)
            slots = torch.tensor(np.concatenate(slots), device=self.device)            # (T,) int64, as tokens
            self.model.prefill(tokens, lengths, self.pool.caches, slots)
            self.stats.prefill_tokens += len(tokens)

    # ---- memory ------------------------------------------------------------------------------------------

    def _plan(self, sequences):
        """Chooses slots, pages and the width of the page table for a request, before any of it is sampled.

        A pool that is large enough stays, graphs included. Otherwise all is built anew, not smaller than it
        was.
        """
        needs = sorted((pages_for(s.end) for s in sequences), reverse=True)
        width = max(round_up(needs[0], 16), self.width)      # some room: prompts differ from step to step
        slots = max(min(len(sequences), MAX_SLOTS[self.device.type]), self.slots)
        # A size that a captured graph has, so that the batch sizes of a run do not depend on its evaluations.
        slots = self.max_slots or next((b for b in BUCKETS if b >= slots), slots)
        # What the largest `slots` sequences need at most, an eighth for larger ones to come, page 0, and the
        # last page of a shared prompt.
        pages = self.max_pages or sum(needs[:slots]) * 9 // 8 + 2
        have = self.pool.capacity + 1 if self.pool else 0
        same = self.pool and (slots, width) == (self.slots, self.width)
        if not same or have < min(pages, self.memory_pages):
            self.release()
            self.memory_pages = self._pages_in_memory(slots, width)
            have = min(max(pages, have), self.memory_pages)
        refuse(have < needs[0] + 2,
               f"the longest prompt + max_new_tokens needs {needs[0] + 2} pages of {PAGE} tokens, there are "
               f"{have}: lower max_new_tokens, or give the sampler more pages or memory")
        if self.pool is None:
            self._build(slots, width, have)

    def _page_bytes(self):
        return sum(pages.nbytes for pages in itertools.chain(*self.model.new_caches(1)))

    def _pages_in_memory(self, slots, width):
        """Pages that fit beside all else on the GPU: activations of the largest prefill, logits of a step."""
        c, free = self.model.config, 0.9 * free_memory(self.device)
        # BF16 a token: residual and norm outputs; q, k, v before and after RoPE, and o; gate, up and product.
        heads = (c.num_attention_heads + c.num_key_value_heads) * c.head_dim
        activations = 2 * (4 * c.hidden_size + 4 * heads + 4 * c.intermediate_size)
        parts = cdiv(width * PAGE, SPLIT)                              # FP32 sums of attention, by part
        used = (max(PREFILL_TOKENS, width * PAGE) * activations
                + 4 * slots * (c.vocab_size + parts * c.num_attention_heads * c.head_dim))
        return int((free - used) // self._page_bytes())

    def _build(self, slots, width, pages):
        """Allocates all that the decode step touches, at addresses that hold until `release`."""
        on = dict(device=self.device)
        rows = round_up(slots, 16)                   # every row vector starts at a multiple of 16 bytes
        self.slots, self.width = slots, width
        self.pool = PagePool(self.model, pages)
        self.ids = torch.zeros(4, rows, dtype=torch.int64, **on)     # current token, key, slot; [3, 0]: step
        self.spans = torch.zeros(3, rows, dtype=torch.int32, **on)   # position; length, 0 when idle; end
        self.table = torch.zeros(rows, width, dtype=torch.int32, **on)
        self.out = torch.zeros(self.steps_per_look, 2, rows, dtype=torch.int32, **on)   # token; log-prob bits
        self.is_stop = torch.zeros(self.model.config.vocab_size, dtype=torch.bool, **on)
        self.seed = torch.zeros(1, dtype=torch.int64, **on)
        self.inv_temp, self.noise = torch.ones(1, **on), torch.ones(1, **on)       # FP32
        # The host's side of the copies: pinned, so that no copy waits or is staged; written through numpy.
        pin = self.device.type == "cuda"
        self.uploads = [torch.zeros(t.shape, dtype=t.dtype, pin_memory=pin)
                        for t in (self.ids, self.spans, self.table)]
        self.host_ids, self.host_spans, self.host_table = (t.numpy() for t in self.uploads)
        self.host_out = torch.zeros(self.out.shape, dtype=torch.int32, pin_memory=pin)
        if pin:
            self.graph_memory = torch.cuda.graph_pool_handle()         # one for all: they never overlap
            line = (f"sampler: {slots} slots, {pages:,} pages of {PAGE} tokens ({pages * PAGE:,} tokens, "
                    f"{pages * self._page_bytes() / 2**30:.1f} GiB), sequences up to {width * PAGE:,} tokens")
            if self.verbose and line != self.told:                     # once, not after every `release`
                print(line, flush=True)
            self.told = line

    def release(self):
        """Frees pages and graphs; the next `generate` builds them again.

        For models that do not fit beside their pages: the trainer gets the memory between two rollouts, at
        the price of a new capture for each batch size.
        """
        self.pool, self.graphs = None, {}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # ---- the loop ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(self, prompts, n=1, max_new_tokens=256, temperature=1.0, seed=0, stop=None, keys=None):
        """Samples n completions of every prompt. -> Rollout

        prompts          lists of token ids
        max_new_tokens   an int, or one per completion (len(prompts) * n of them)
        temperature      divides the logits, also in the log-probs; 0 is greedy (ties to the lowest id), with
                         the log-probs of temperature 1
        seed, keys       all that the noise of a position depends on; keys name completions (default 0, 1, ..)
        stop             ids that end a completion (default: config.eos_token_id); [] runs to the limit

        ValueError, before anything is sampled, for what cannot be served; FloatingPointError for log-probs
        that are NaN or Inf.
        """
        start = time.perf_counter()
        prompts, limits, stop, keys = check_request(
            self.model.config, prompts, n, max_new_tokens, temperature, seed, stop, keys)
        prefixes = [_Prefix(prompt[:-1], waiting=n) for prompt in prompts]
        sequences = [_Sequence(i, prompts[i // n], prefixes[i // n], keys[i], limit,
                               np.empty(limit, np.int32), np.empty(limit, np.float32))
                     for i, limit in enumerate(limits)]
        self._plan(sequences)
        self.pool.reset()                            # also after a call that an error or Ctrl-C ended halfway
        self.queue, self.active, self.shared, self.admissions = deque(sequences), [], None, 0
        self.stop, self.stats, self.shown = set(stop), Rollout(), start
        self.is_stop.zero_()[stop] = True
        self.seed.fill_(seed)
        # Written in place: a graph would bake numbers. 1/temperature is made on the host, as in the trainer.
        self.inv_temp.fill_(1 / temperature if temperature else 1.0)
        self.noise.fill_(1.0 if temperature else 0.0)

        while self.queue or self.active:
            self._reserve()                          # before admission: the running ones, older, come first
            self._admit()
            steps = min(self.steps_per_look, max(s.limit - s.count for s in self.active))
            self._launch(steps)
            self._harvest(steps)
            if self.verbose:
                self._progress(len(sequences), start)

        assert self.pool.free == self.pool.capacity, "pages were not returned"
        result = self.stats
        result.tokens = [s.tokens[:s.count].tolist() for s in sequences]
        result.logprobs = [torch.from_numpy(s.logprobs[:s.count].copy()) for s in sequences]
        result.finish = ["stop" if s.current in self.stop else "length" for s in sequences]
        result.occupancy = result.n_tokens / (result.steps * self.slots)
        result.seconds = time.perf_counter() - start
        return result

    def _progress(self, total, start):
        """A line now and then, where a rollout is a long one."""
        now = time.perf_counter()
        if now - self.shown > QUIET_SECONDS:
            self.shown = now
            print(f"rollout: {total - len(self.queue) - len(self.active):,} of {total:,} sequences, "
                  f"{self.stats.n_tokens:,} tokens, {self.stats.n_tokens / (now - start):,.0f} tok/s, "
                  f"{self.pool.capacity - self.pool.free:,} of {self.pool.capacity:,} pages", flush=True)


def refuse(wrong, message):
    if wrong:
        raise ValueError(message)


def check_request(config, prompts, n, max_new_tokens, temperature, seed, stop, keys):
    """Refuses what cannot be served, with the numbers. -> prompts (lists), limits, stop ids, keys."""
    V, most, total = config.vocab_size, config.max_position_embeddings, len(prompts) * n
    refuse(not 1 <= n <= MAX_SAMPLES, f"n is {n}: a prompt takes 1 to {MAX_SAMPLES} completions")
    refuse(len(prompts) == 0, "there are no prompts")
    limits = [max_new_tokens] * total if isinstance(max_new_tokens, int) else list(max_new_tokens)
    keys = list(range(total) if keys is None else keys)
    for name, given in ("max_new_tokens", limits), ("keys", keys):
        refuse(len(given) != total, f"{name} has {len(given)} entries for {total} completions "
                                    f"({len(prompts)} prompts, n={n}): give one each")
    for i, limit in enumerate(limits):
        refuse(limit < 1, f"max_new_tokens of completion {i} is {limit}: it must be at least 1")
    arrays = [np.asarray(prompt) for prompt in prompts]
    for i, ids in enumerate(arrays):
        refuse(ids.size == 0, f"prompt {i} is empty: there is no token to continue from")
        refuse(ids.ndim != 1 or ids.dtype.kind not in "iu", f"prompt {i} is not a flat list of token ids")
        low, high, longest = ids.min(), ids.max(), len(ids) + max(limits[i * n:(i + 1) * n])
        refuse(low < 0 or high >= V, f"prompt {i} holds the id {low if low < 0 else high}, but the model has "
                                     f"{V} ids: was it encoded by another tokenizer?")
        refuse(longest > most, f"prompt {i} has {len(ids)} tokens, {longest} with max_new_tokens, but the "
                               f"model takes {most} (max_position_embeddings): shorten the one or the other")
    refuse(not (temperature == 0 or 1e-6 <= temperature < math.inf),                     # NaN as well
           f"temperature is {temperature}: it must be 1e-6 or more, or logits overflow; 0 is greedy")
    stop = list(config.eos_token_id if stop is None else stop)
    refuse(any(not 0 <= s < V for s in stop), f"stop holds an id outside 0..{V - 1}: {stop}")
    refuse(any(not -2**63 <= k < 2**63 for k in keys + [seed]), f"seed {seed} and keys must fit 64 bits")
    return [ids.tolist() for ids in arrays], limits, stop, keys


# ---- the command line: talk to a checkpoint --------------------------------------------------------------

class Parser(argparse.ArgumentParser):
    """Raises ValueError, one line, where argparse would print all of its usage and exit. An unknown flag is
    refused with the nearest name."""

    def error(self, message):
        unknown = message.partition("unrecognized arguments: ")[2].split()
        if unknown:
            near = difflib.get_close_matches(unknown[0].split("=")[0], self._option_string_actions, 1)
            message = f"unknown argument '{unknown[0]}'" + (f": did you mean {near[0]}?" if near else "")
        raise ValueError(f"{message} (--help lists the flags)")


def explain(error, lower):
    """An exception as the one or two lines that a person needs; `lower` names flags that save GPU memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"error: out of GPU memory: lower {lower}\n{str(error).split('. ')[0]}"
    lines = str(error).strip().splitlines()[:2] or [""]
    if not isinstance(error, (ValueError, RuntimeError, OSError, ImportError, ArithmeticError)):
        lines[0] = f"{type(error).__name__}: {lines[0]} (--debug shows where)"   # a fault of the code
    return "error: " + "\n".join(lines)


def talk(args):
    """Samples, prints the completions on stdout (a terminal shows progress too), all else on stderr."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    folder = folder_from_name(args.model)             # what can be wrong is found before weights are read
    config, tokenizer = Config.from_folder(folder), Tokenizer.from_pretrained(folder)
    if tokenizer.template is not None:
        ids = tokenizer.chat([{"role": "user", "content": args.prompt}], args.thinking)
    else:
        ids = tokenizer.encode(args.prompt)              # a base model continues the text
    request = [ids], args.n, args.max_new_tokens, args.temperature, args.seed, tokenizer.eos_ids, None
    check_request(config, *request)
    if device == "cpu":
        print("on the CPU: the plain torch reference, exact and slow", file=sys.stderr)
    model = Transformer.from_pretrained(folder, precision=args.precision, device=device, kv=args.kv)
    rollout = Sampler(model, verbose=sys.stdout.isatty()).generate(*request)
    for i, (tokens, finish) in enumerate(zip(rollout.tokens, rollout.finish)):
        if args.n > 1:
            print(f"---- {i + 1} of {args.n}")
        print(tokenizer.decode(tokens[:-1]) if finish == "stop" else tokenizer.decode(tokens) + " [...]")
    print(f"{len(ids)} prompt tokens, {rollout.n_tokens} sampled in {rollout.seconds:.1f} s "
          f"({rollout.tok_per_s:,.0f} tok/s, compilation included)", file=sys.stderr)


def main():
    parser = Parser(description="Sample from a checkpoint folder.")
    parser.add_argument("--model", required=True, help="Hugging Face folder, or one that train.py saved")
    parser.add_argument("--prompt", required=True, help="put into the chat template, if there is one")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="length limit of a completion")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    parser.add_argument("--n", type=int, default=1, help="completions of the prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", default="fp8", choices=PRECISIONS, help="fp8, fp8-rollout or bf16")
    parser.add_argument("--kv", default="bf16", choices=KV_TYPES, help="type of cached keys and values")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--thinking", action=argparse.BooleanOptionalAction, help="for templates that ask")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    try:
        talk(parser.parse_args())
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        sys.exit(explain(error, "--n or --max-new-tokens"))
    except KeyboardInterrupt:
        sys.exit("interrupted")


if __name__ == "__main__":
    main()
