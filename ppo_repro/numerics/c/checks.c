// Checks at the first use of the library: the CPU's state, and a known answer. The known answer is a digest
// of all that two small models compute, forward and backward; a library that computes anything else is
// refused (library.py).
#include "kernels.h"

// The bits of 1e-40 x 1, computed now: 0 if denormal numbers are flushed in the calling thread
uint32_t denormal_product(void) {
  volatile float small = 1e-40f;
  volatile float one = 1.0f;
  return as_bits(small * one);
}

// ------------------------------------------------------------------------------------------- made-up numbers

// The i-th number of a fixed sequence in [-1, 1)
static float numbered(uint32_t i) {
  i = (i ^ (i >> 16)) * 0x7feb352du;
  i = (i ^ (i >> 15)) * 0x846ca68bu;
  return (float)(int32_t)(i ^ (i >> 16)) * 0x1p-31f;
}

// FNV-1a, continued over `count` words of 32 bits
static uint64_t hashed(uint64_t hash, const void *words, long count) {
  for (long i = 0; i < count; i++) {
    uint32_t word;
    memcpy(&word, (const char *)words + 4 * i, 4);
    for (int shift = 0; shift < 32; shift += 8) hash = (hash ^ ((word >> shift) & 255)) * 0x100000001b3u;
  }
  return hash;
}

// The same over `count` words that kernels wrote
static uint64_t hashed_results(uint64_t hash, const void *words, long count) {
  return hashed(hash, on_host(words, (size_t)count * 4), count);
}

// Parameters one after the other, in the order in which they are made; offsets of gradients are those of
// parameters. Both lie in memory of kernels.
typedef struct {
  Arena parameters;
  Arena free;
} Plan;

enum { PARAMETERS = 1 << 17, FLOATS = 1 << 20 };

// n parameters center + size x [-1, 1); *at is where they begin
static float *some_numbers(Plan *plan, long n, float center, float size, long *at) {
  float *here = plan->parameters.memory + plan->parameters.used;
  float *numbers = allocate_zeros((size_t)n, sizeof(float));
  *at = plan->parameters.used;
  for (long i = 0; i < n; i++) numbers[i] = fma32(size, numbered((uint32_t)(*at + i)), center);
  copy_to_kernels(here, numbers, (size_t)n * sizeof(float));
  free(numbers);
  plan->parameters.used += n;
  return here;
}

static NormWeights some_norm(Plan *plan, int n, int biased) {
  NormWeights w = {.grad = -1, .b_grad = -1};
  w.w = some_numbers(plan, n, 1.0f, 0.3f, &w.grad);
  if (biased) w.b = some_numbers(plan, n, 0.0f, 0.3f, &w.b_grad);
  return w;
}

static Matrix some_matrix(Plan *plan, int n, int k) {
  Matrix w = {.n = n, .k = k};
  w.panels = take(&plan->free, panel_floats(n, k));
  w.w = some_numbers(plan, (long)n * k, 0.0f, 0.3f, &w.grad);
  w.bias = some_numbers(plan, n, 0.0f, 0.3f, &w.bias_grad);
  pack(&w);
  return w;
}

// ------------------------------------------------------------------------------------------------ two models

// Sequences of 135, 4 and 17 tokens; two layers, whose inner width is more than a block
enum { SEQUENCES = 3, TOKENS = 135 + 4 + 17, POSITIONS = 135, CAPACITY = 144 + 16 + 32 };
enum { HIDDEN = 24, HEADS = 2, HEAD_DIM = 12, ROTARY = 8, INNER = 136 };
enum { VOCABULARY = 67, EXPERTS = 3, CHOSEN = 2 };

// The first model has RMS norms, norms of heads, rotary positions, gates, and experts in the second layer.
// The second one has layer norms, learned positions, GELU, attention and MLP in parallel, and a window in the
// second layer.
typedef enum { FIRST_MODEL, SECOND_MODEL } WhichModel;

typedef struct {
  Model model;
  Layer layers[2];
  Matrix expert_up[EXPERTS];
  Matrix expert_down[EXPERTS];
  Matrix head;
} SomeModel;

static Layer some_layer(Plan *plan, WhichModel which, int index, SomeModel *of) {
  const int second = which == SECOND_MODEL;
  const int gated = !second;
  const int with_experts = which == FIRST_MODEL && index == 1;
  Layer l = {.window = second && index == 1 ? 40 : 0, .scale = 0.25f};
  l.norm1 = some_norm(plan, HIDDEN, second);
  l.norm2 = some_norm(plan, HIDDEN, second);
  if (which == FIRST_MODEL) {
    l.q_norm = some_norm(plan, HEAD_DIM, 0);
    l.k_norm = some_norm(plan, HEAD_DIM, 0);
  }
  l.qkv = some_matrix(plan, (HEADS + 2) * HEAD_DIM, HIDDEN);
  l.out = some_matrix(plan, HIDDEN, HEADS * HEAD_DIM);
  if (!with_experts) {
    l.up = some_matrix(plan, gated ? 2 * INNER : INNER, HIDDEN);
    l.down = some_matrix(plan, HIDDEN, INNER);
    return l;
  }
  for (int e = 0; e < EXPERTS; e++) {
    of->expert_up[e] = some_matrix(plan, 2 * INNER, HIDDEN);
    of->expert_down[e] = some_matrix(plan, HIDDEN, INNER);
  }
  l.router = some_matrix(plan, EXPERTS, HIDDEN);
  l.expert_up = of->expert_up;
  l.expert_down = of->expert_down;
  return l;
}

static void make_model(Plan *plan, WhichModel which, SomeModel *of) {
  const int second = which == SECOND_MODEL;
  Model m = {
      .layers = 2,
      .hidden = HIDDEN,
      .heads = HEADS,
      .kv_heads = 1,
      .head_dim = HEAD_DIM,
      .vocabulary = VOCABULARY,
      .norm = second ? NORM_LAYER : NORM_RMS,
      .qk_norm = second ? QK_NORM_NONE : QK_NORM_HEAD,
      .rotary = second ? 0 : ROTARY,
      .activation = second ? ACT_GELU_TANH : ACT_SILU,
      .gated = !second,
      .parallel = second,
      .experts = EXPERTS,
      .chosen = CHOSEN,
      .normalised = 1,
      .mixtures = !second,
      .q_step = HEAD_DIM,
      .k_at = HEADS * HEAD_DIM,
      .k_step = HEAD_DIM,
      .v_at = (HEADS + 1) * HEAD_DIM,
      .v_step = HEAD_DIM,
      .padding = -1,
      .eps = 1e-5f,
      .embedding_scale = 1.0f,
      .layer = of->layers,
  };
  m.embedding = some_numbers(plan, VOCABULARY * HIDDEN, 0.0f, 1.0f, &m.embedding_grad);
  if (second) {
    m.position_entries = POSITIONS;
    m.positions = some_numbers(plan, POSITIONS * HIDDEN, 0.0f, 1.0f, &m.positions_grad);
  } else {
    long not_trained;  // any numbers will do for cosines and sines
    m.cosine = some_numbers(plan, POSITIONS * ROTARY / 2, 0.0f, 1.0f, &not_trained);
    m.sine = some_numbers(plan, POSITIONS * ROTARY / 2, 0.0f, 1.0f, &not_trained);
  }
  for (int index = 0; index < 2; index++) of->layers[index] = some_layer(plan, which, index, of);
  m.last_norm = some_norm(plan, HIDDEN, second);
  of->model = m;
  of->head = some_matrix(plan, VOCABULARY, HIDDEN);
}

// -------------------------------------------------------------------------------------------- a known answer

// Position of each token, and its next token
typedef struct {
  int ids[TOKENS];
  int position[TOKENS];
  int sequence[TOKENS];
  int64_t position64[TOKENS];
  int64_t targets[TOKENS];
} SomeTokens;

static const int START[SEQUENCES + 1] = {0, 135, 139, 156};
static const int BASE[SEQUENCES] = {0, 144, 160};
static const int SLOT[SEQUENCES + 1] = {0, 1, 3, 4};

static void make_tokens(SomeTokens *of) {
  for (int t = 0; t < TOKENS; t++) {
    of->sequence[t] = (t >= START[1]) + (t >= START[2]);
    of->position[t] = t - START[of->sequence[t]];
    of->position64[t] = of->position[t];
    of->ids[t] = (7 * t) % VOCABULARY;
    of->targets[t] = (11 * t) % VOCABULARY;
  }
}

// The digest of a forward pass, sampled tokens, log-probs, a backward pass and a step of AdamW
static uint64_t answer_of(WhichModel which, uint64_t hash) {
  float *memory = kernel_zeros(FLOATS);
  Plan plan = {.parameters = {memory, 0}, .free = {memory, PARAMETERS}};
  SomeModel of;
  SomeTokens at;
  make_model(&plan, which, &of);
  make_tokens(&at);
  const Model *m = &of.model;
  const long parameters = plan.parameters.used;
  Arena *free_memory = &plan.free;

  float *hidden = take(free_memory, TOKENS * HIDDEN);
  float *logits = take(free_memory, TOKENS * VOCABULARY);
  float *out = take(free_memory, 3 * TOKENS);
  float *d_logits = take(free_memory, TOKENS * VOCABULARY);
  float *d_hidden = take(free_memory, TOKENS * HIDDEN);
  float *d_logprobs = take(free_memory, TOKENS);
  float *d_entropies = take(free_memory, TOKENS);
  float *gradient = take(free_memory, parameters);
  float *first_moment = take(free_memory, parameters);
  float *second_moment = take(free_memory, parameters);
  float *keys = take(free_memory, 2L * CAPACITY * HEAD_DIM);
  float *values = take(free_memory, 2L * CAPACITY * HEAD_DIM);
  float *kept = take(free_memory, kept_floats(m, TOKENS, KEEP_ALL));
  int64_t *seeds = take(free_memory, 2 * TOKENS);
  int64_t *positions = take(free_memory, 2 * TOKENS);
  int64_t *tokens = take(free_memory, 2 * TOKENS);
  Softmax *rows = take(free_memory, 8 * TOKENS);
  if (parameters > PARAMETERS || free_memory->used > FLOATS) abort();

  // forward
  const Batch batch = {
      .tokens = TOKENS,
      .sequences = SEQUENCES,
      .ids = at.ids,
      .position = at.position,
      .sequence = at.sequence,
      .start = START,
      .base = BASE,
      .slots = SLOT,
      .keys = keys,
      .values = values,
      .capacity = CAPACITY,
  };
  model_forward(m, &batch, kept, KEEP_ALL, hidden);
  linear(&of.head, hidden, TOKENS, NULL, logits);
  hash = hashed_results(hash, logits, TOKENS * VOCABULARY);

  // sampling
  copy_to_kernels(seeds, at.targets, sizeof(at.targets));
  copy_to_kernels(positions, at.position64, sizeof(at.position64));
  const Sampling sampling = {
      .logits = logits,
      .ld = VOCABULARY,
      .n = TOKENS,
      .v = VOCABULARY,
      .temperature = 0.8f,
      .seeds = seeds,
      .positions = positions,
      .tokens = tokens,
      .logprobs = out,
      .rows = rows,
  };
  sample_tokens(&sampling);
  hash = hashed_results(hash, out, TOKENS);
  hash = hashed_results(hash, tokens, 2 * TOKENS);

  // statistics, and their gradients
  float seed[2 * TOKENS];
  for (int t = 0; t < TOKENS; t++) {
    seed[t] = numbered((uint32_t)t);
    seed[TOKENS + t] = 0.01f;
  }
  copy_to_kernels(d_logprobs, seed, TOKENS * sizeof(float));
  copy_to_kernels(d_entropies, seed + TOKENS, TOKENS * sizeof(float));
  const Statistics statistics = {
      .logits = logits,
      .ld = VOCABULARY,
      .n = TOKENS,
      .v = VOCABULARY,
      .temperature = 0.8f,
      .targets = seeds,  // the same numbers
      .rows = rows,
      .logprobs = out,
      .entropies = out + TOKENS,
      .squares = out + 2 * TOKENS,
      .d_logprobs = d_logprobs,
      .d_entropies = d_entropies,
      .gradient = d_logits,
  };
  token_statistics(&statistics);
  hash = hashed_results(hash, out, 3 * TOKENS);
  token_statistics_gradient(&statistics);

  // backward
  const Sums sums = {.level = {gradient}, .levels = 2, .last = SLOT[SEQUENCES]};
  linear_backward(&of.head, d_logits, hidden, TOKENS, at.sequence, at.position, SLOT, &sums, d_hidden);
  model_backward(m, &batch, kept, KEEP_ALL, d_hidden, &sums);
  hash = hashed_results(hash, gradient, parameters);

  // a step
  Trained all = {.p = memory, .g = gradient, .m = first_moment, .v = second_moment, .n = parameters};
  const double square = gradient_squares(&all, 1);
  hash = hashed(hash, &square, 2);
  const Step step = {
      .clip = 0.5f,
      .beta1 = 0.9f,
      .rest1 = 0.1f,
      .beta2 = 0.99f,
      .rest2 = 0.01f,
      .keep = 0.999f,
      .rate = 0.01f,
      .unroot = 10.0f,
      .eps = 1e-8f,
  };
  adamw(&all, 1, &step);
  hash = hashed_results(hash, memory, parameters);
  free_kernel_memory(memory);
  return hash;
}

// The digest of both models, in milliseconds
uint64_t known_answer(void) {
  uint64_t hash = answer_of(FIRST_MODEL, 0xcbf29ce484222325u);
  return answer_of(SECOND_MODEL, hash);
}
