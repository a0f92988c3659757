// What the first use of the library checks: the CPU's state and a known answer.

// The bits of 1e-40 x 1, computed now: 0 if denormal numbers are flushed in the calling thread
uint32_t denormal_product(void) {
  volatile float small = 1e-40f, one = 1.0f;
  return as_bits(small * one);
}

// The i-th number of a fixed sequence in [-1, 1)
static float numbered(uint32_t i) {
  i = (i ^ (i >> 16)) * 0x7feb352du;
  i = (i ^ (i >> 15)) * 0x846ca68bu;
  return (float)(int32_t)(i ^ (i >> 16)) * 0x1p-31f;
}

// ---------------------------------------------------------------------------------------------------- a known answer

// FNV-1a, gone on with over 32-bit words; floats and tokens are words
static uint64_t hashed(uint64_t hash, const void *words, long count) {
  for (long i = 0; i < count; i++) {
    uint32_t word;
    memcpy(&word, (const char *)words + 4 * i, 4);
    for (int shift = 0; shift < 32; shift += 8) hash = (hash ^ ((word >> shift) & 255)) * 0x100000001b3u;
  }
  return hash;
}

// Sequences of 135, 4 and 17 tokens, and a model of two layers, whose inner width is more than a block
enum { PEOPLE = 3, WORDS = 135 + 4 + 17, CELLS = 144 + 16 + 32, WIDTH = 24, HEAD = 12, INNER = 136, KINDS = 67, CHOICES = 3 };
enum { PARAMETERS = 1 << 17, FLOATS = 1 << 20 };

typedef struct { float *parameters, *free; long count; } Plan;

static float *some_numbers(Plan *plan, long n, float center, float size, long *at) {
  float *here = plan->parameters + plan->count;
  *at = plan->count;
  for (long i = 0; i < n; i++) here[i] = fma32(size, numbered((uint32_t)plan->count++), center);
  return here;
}

static NormWeights some_norm(Plan *plan, int n, int biased) {
  NormWeights w = {NULL, NULL, -1, -1};
  w.w = some_numbers(plan, n, 1.0f, 0.3f, &w.grad);
  if (biased) w.b = some_numbers(plan, n, 0.0f, 0.3f, &w.b_grad);
  return w;
}

static Matrix some_matrix(Plan *plan, int n, int k) {
  Matrix w = {.n = n, .k = k, .panels = take(&plan->free, panel_floats(n, k))};
  w.w = some_numbers(plan, (long)n * k, 0.0f, 0.3f, &w.grad);
  w.bias = some_numbers(plan, n, 0.0f, 0.3f, &w.bias_grad);
  pack(&w);
  return w;
}

// `other` 0: RMS norms, norms of heads, rotary positions, gates, experts in the second layer.
// `other` 1: layer norms, learned positions, GELU, attention and MLP in parallel, a window in the second layer.
static Model some_model(Plan *plan, int other, Layer layers[2], Matrix experts[2][CHOICES]) {
  Model m = {.layers = 2, .hidden = WIDTH, .heads = 2, .kv_heads = 1, .head_dim = HEAD, .vocabulary = KINDS};
  m.q_step = m.k_step = m.v_step = HEAD, m.k_at = 2 * HEAD, m.v_at = 3 * HEAD;
  m.eps = 1e-5f, m.embedding_scale = 1.0f, m.padding = -1, m.layer = layers;
  m.norm = other ? NORM_LAYER : NORM_RMS, m.qk_norm = other ? QK_NORM_NONE : QK_NORM_HEAD;
  m.activation = other ? ACT_GELU_TANH : ACT_SILU, m.gated = !other, m.parallel = other, m.rotary = other ? 0 : 8;
  m.embedding = some_numbers(plan, KINDS * WIDTH, 0.0f, 1.0f, &m.embedding_grad);
  if (other) {
    m.positions = some_numbers(plan, (m.position_entries = 135) * WIDTH, 0.0f, 1.0f, &m.positions_grad);
  } else {
    long unused;  // these angles are trained: nothing is known of sines
    m.cosine = some_numbers(plan, 135 * 4, 0.0f, 1.0f, &unused), m.sine = some_numbers(plan, 135 * 4, 0.0f, 1.0f, &unused);
  }
  for (int i = 0; i < 2; i++) {
    Layer l = {.norm1 = some_norm(plan, WIDTH, other), .norm2 = some_norm(plan, WIDTH, other)};
    l.window = other && i ? 40 : 0, l.scale = 0.25f;
    if (!other) l.q_norm = some_norm(plan, HEAD, 0), l.k_norm = some_norm(plan, HEAD, 0);
    l.qkv = some_matrix(plan, 4 * HEAD, WIDTH), l.out = some_matrix(plan, WIDTH, 2 * HEAD);
    int up = other ? INNER : 2 * INNER, copies = other || !i ? 1 : CHOICES;
    for (int e = 0; e < copies; e++) {
      experts[0][e] = some_matrix(plan, up, WIDTH), experts[1][e] = some_matrix(plan, WIDTH, INNER);
    }
    if (copies == 1) l.up = experts[0][0], l.down = experts[1][0];
    else l.router = some_matrix(plan, CHOICES, WIDTH), l.expert_up = experts[0], l.expert_down = experts[1];
    layers[i] = l;
  }
  m.experts = CHOICES, m.chosen = 2, m.normalised = 1, m.mixtures = !other;
  m.last_norm = some_norm(plan, WIDTH, other);
  return m;
}

// The digest of a forward pass, log-probs, sampled tokens, a backward pass and a step of AdamW
static uint64_t answer_of(int other, uint64_t hash) {
  float *memory = calloc(FLOATS, sizeof(float));
  if (!memory) abort();
  Plan plan = {memory, memory + PARAMETERS, 0};
  Layer layers[2];
  Matrix experts[2][CHOICES];
  Model m = some_model(&plan, other, layers, experts);
  Matrix head = some_matrix(&plan, KINDS, WIDTH);
  float *hidden = take(&plan.free, WORDS * WIDTH), *logits = take(&plan.free, WORDS * KINDS), *out = take(&plan.free, 3 * WORDS);
  float *d_logits = take(&plan.free, WORDS * KINDS), *d_hidden = take(&plan.free, WORDS * WIDTH), *seeds = take(&plan.free, 2 * WORDS);
  float *gradient = take(&plan.free, plan.count), *first = take(&plan.free, plan.count), *second = take(&plan.free, plan.count);
  float *keys = take(&plan.free, 2L * CELLS * HEAD), *values = take(&plan.free, 2L * CELLS * HEAD);
  float *kept = take(&plan.free, kept_floats(&m, WORDS, KEEP_ALL));
  if (plan.count > PARAMETERS || plan.free > memory + FLOATS) abort();

  static const int start[PEOPLE + 1] = {0, 135, 139, 156}, base[PEOPLE] = {0, 144, 160}, slots[PEOPLE + 1] = {0, 1, 3, 4};
  int ids[WORDS], position[WORDS], sequence[WORDS];
  int64_t targets[WORDS], where[WORDS], tokens[WORDS];
  Softmax rows[WORDS];
  for (int t = 0; t < WORDS; t++) {
    sequence[t] = (t >= start[1]) + (t >= start[2]), where[t] = position[t] = t - start[sequence[t]];
    ids[t] = (7 * t) % KINDS, targets[t] = (11 * t) % KINDS, seeds[t] = numbered((uint32_t)t), seeds[WORDS + t] = 0.01f;
  }
  Batch b = {.tokens = WORDS, .sequences = PEOPLE, .ids = ids, .position = position, .sequence = sequence, .start = start,
             .base = base, .slots = slots, .keys = keys, .values = values, .capacity = CELLS};
  Sums sums = {.level = {gradient}, .levels = 2, .last = 4};

  model_forward(&m, &b, kept, KEEP_ALL, hidden);
  linear(&head, hidden, WORDS, NULL, logits);
  sample_tokens(&(Sampling){logits, KINDS, WORDS, KINDS, 0.8f, targets, where, NULL, NULL, tokens, out, rows});
  hash = hashed(hashed(hashed(hash, logits, WORDS * KINDS), out, WORDS), tokens, 2 * WORDS);
  Statistics of = {logits, KINDS, WORDS, KINDS, 0.8f, NULL, targets, rows, out, out + WORDS, out + 2 * WORDS,
                   seeds, seeds + WORDS, d_logits};
  token_statistics(&of);
  hash = hashed(hash, out, 3 * WORDS);

  token_statistics_gradient(&of);
  linear_backward(&head, d_logits, hidden, WORDS, sequence, position, slots, &sums, d_hidden);
  model_backward(&m, &b, kept, KEEP_ALL, d_hidden, &sums);
  Trained all = {plan.parameters, gradient, first, second, plan.count, 0.0};
  double square = gradient_squares(&all, 1);
  hash = hashed(hashed(hash, gradient, plan.count), &square, 2);
  adamw(&all, 1, &(Step){0.5f, 0.9f, 0.1f, 0.99f, 0.01f, 0.999f, 0.01f, 10.0f, 1e-8f});
  hash = hashed(hash, plan.parameters, plan.count);
  free(memory);
  return hash;
}

// The digest of two small models, in milliseconds
uint64_t known_answer(void) { return answer_of(1, answer_of(0, 0xcbf29ce484222325u)); }
