// The interface of the kernels: every number, struct and function that Python sees, but the two of
// gpu/driver.h. `interface.py` reads this text with cffi, so it has declarations and plain #defines alone;
// `operations.h` includes it once, for C.
//
// Shapes stand in brackets, e.g. [tokens][hidden], the last index running fastest. Arrays are contiguous, but
// rows of logits are `ld` floats apart. A pointer belongs to the caller, who keeps its memory alive while a
// call runs. Nothing here may be called by two threads at once: there is one pool of threads and one set of
// scratch memory. Each call follows a begin_call. If `count` of last_failure has grown after it, the call has
// failed, and its results are of no use. Offsets of gradients count floats.

// --------------------------------------------------------------------------------------- numbers with a name

// The norm of a row x, with its factor r: w x r;  (1 + w) x r;  w (x - mean) r + b
typedef enum { NORM_RMS, NORM_RMS_OFFSET, NORM_LAYER } NormKind;

// Norms of queries and keys: none; one for each head; one for all heads together
typedef enum { QK_NORM_NONE, QK_NORM_HEAD, QK_NORM_WHOLE } QkNormKind;

// rows.c has their functions
typedef enum { ACT_SILU, ACT_GELU, ACT_GELU_TANH } ActivationKind;

// What a pass keeps in memory for its backward pass: nothing, because there is none; the inputs of layers,
// from which the backward pass computes everything else again; everything that the backward pass needs
typedef enum { KEEP_NOTHING, KEEP_INPUTS, KEEP_ALL } Keep;

// Formats of deliberate rounding (rounding.c); FLOAT32 does not round
typedef enum {
  FORMAT_FLOAT32,
  FORMAT_BFLOAT16,
  FORMAT_FLOAT16,
  FORMAT_FLOAT8_E4M3,
  FORMAT_FLOAT8_E5M2,
  FORMAT_INT8
} NumberFormat;

// How linear layers sum products: in chains of float32; in exact sums of integers
typedef enum { PRECISION_HIGHEST, PRECISION_HIGH } Precision;

enum { BLOCK = 128 };  // rules 1, 2 and 4: terms of a chain, or of an exact sum

enum { STRETCH = 4096 };  // rule 3: elements whose squares are summed as one row

enum { MAX_LEVELS = 8 };  // arrays of partial sums of gradients: a minibatch has at most 2^7 slots

// The largest model. The kernels count in ints the elements of a row, and the key heads of all layers
// together.
#define MAX_LAYERS 1024
#define MAX_WIDTH 1048576
#define MAX_VOCABULARY 16777216
#define MAX_EXPERTS 1024

// ------------------------------------------------------------------------------ matrices and their gradients

// A linear layer y = x w^T + bias
typedef struct {
  const float *w;     // [n][k], or [k][n] if `transposed`
  const float *bias;  // [n], or NULL
  float *panels;      // panel_floats(n, k, precision) floats, which `pack` fills: [ceil(n / 16)][k][16], or
                      // integers; on a GPU integers alone
  long grad;          // offset of the gradient of w; -1: not trained
  long bias_grad;     // offset of the gradient of the bias; -1: not trained
  int n;              // outputs
  int k;              // inputs: the terms of a product
  int transposed;
  Precision precision;
} Matrix;

// Partial sums of the gradients of a minibatch (rule 2), to which a backward pass adds. A minibatch has
// 2^levels slots of sequences, whose sums are joined as a binary tree. For example, when slots 0 to 5 are
// complete, level[3] holds the sum of slots 0 to 3, level[2] the sum of slots 4 and 5, and level[0] what slot
// 6 has so far. In general, when slots 0 to s - 1 are complete, level[i + 1] holds a subtree of 2^i slots for
// each bit i that is 1 in s. In the end level[0] holds the whole tree. One backward pass goes from slot
// `first` to slot `last`. All arrays have the same offsets.
typedef struct {
  float *level[MAX_LEVELS];
  int levels;
  int first;
  int open;        // level[0] has a part of slot `first` when the pass begins
  int last;
  int stays_open;  // level[0] has a part of slot `last` when the pass ends
} Sums;

// ------------------------------------------------------------------------------------------------- the model

typedef struct {
  const float *w;
  const float *b;  // NULL without a bias
  long grad;       // offsets of gradients; -1: not trained
  long b_grad;
} NormWeights;

// Rotary positions; zeros in a layer without them
typedef struct {
  int elements;         // how many of a head rotate
  const float *cosine;  // [positions][elements / 2]
  const float *sine;
} Rotary;

typedef struct {
  NormWeights norm1;           // of the input of attention; with norms_before
  NormWeights norm1_after;     // of the result of attention; with norms_after
  NormWeights norm2;           // of the input of the MLP
  NormWeights norm2_after;     // of the result of the MLP
  NormWeights q_norm;
  NormWeights k_norm;
  Matrix qkv;                  // queries, keys and values of all heads
  Matrix out;
  Matrix up;                   // with gates [2 mlp]: the gates first
  Matrix down;
  Matrix router;               // only with experts
  const Matrix *expert_up;     // [experts]; NULL: the layer has one MLP, and no experts
  const Matrix *expert_down;   // [experts]
  int norms_before;
  int norms_after;
  int window;                  // keys that a query sees, itself included; 0: all
  int mixture;                 // how many layers before this one have experts
  Rotary rotary;
  float scale;                 // of scores
  float score_cap;             // scores become score_cap tanh(score / score_cap); 0: they stay
} Layer;

typedef struct {
  int layers;
  int hidden;
  int heads;
  int kv_heads;
  int head_dim;
  int vocabulary;
  NormKind norm;
  QkNormKind qk_norm;
  NormKind head_norm;              // of queries and keys: NORM_RMS or NORM_RMS_OFFSET
  ActivationKind activation;
  int gated;                       // act(gate) up instead of act(up)
  int parallel;                    // the MLP reads the layer's input, not the sum of input and attention
  int experts;                     // of a layer that has experts
  int chosen;                      // experts that a token goes to
  int normalised;                  // routing weights are a softmax over the chosen experts, not over all
  int mixtures;                    // layers with experts
  int q_at;                        // first column of the queries in a row of qkv
  int q_step;                      // and their distance
  int k_at;
  int k_step;
  int v_at;
  int v_step;
  NumberFormat round_activations;  // of the result of each step
  NumberFormat round_inputs;       // of the inputs of linear layers, but for router and head
  NumberFormat round_cache;        // of keys and values
  int position_entries;            // rows of `positions`
  int padding;                     // a token whose embedding is not trained, or -1
  float eps;                       // of norms
  float embedding_scale;
  float residual_scale;            // of results of attention and MLP, where they are added
  const float *embedding;          // [vocabulary][hidden]
  const float *positions;          // learned: [position_entries][hidden]; NULL: none
  long embedding_grad;
  long positions_grad;
  NormWeights last_norm;
  const Layer *layer;              // [layers]
} Model;

// Rows of tokens, sequence after sequence, without padding. Keys and values lie in a cache, whose capacity
// counts positions of all sequences together; the seat of sequence s begins at base[s], a multiple of 16.
typedef struct {
  int tokens;
  int sequences;
  const int *ids;       // [tokens]
  const int *position;  // [tokens], in its sequence
  const int *sequence;  // [tokens], rising
  const int *start;     // [sequences + 1]: rows of sequence s are start[s] .. start[s + 1] - 1
  const int *base;      // [sequences]
  const int *slots;     // [sequences + 1]: slot of each sequence, and of the one after them (see Sums)
  float *keys;          // [layers][kv_heads][capacity / 16][head_dim][16]
  float *values;        // [layers][kv_heads][capacity][head_dim]
  long capacity;
  const int *routes;    // [tokens][mixtures][chosen] experts to replay, rising; NULL: routers choose
  int *seen;            // [tokens][mixtures][chosen]: receives the experts; or NULL
} Batch;

// ------------------------------------------------------------------------------------- rows of logits [n][v]

// softmax(z / temperature) of a row z over its eligible tokens
typedef struct {
  double top;        // the largest z / temperature
  double total;      // sum of e = exp(shifted), shifted = z / temperature - top
  double log_total;  // ln total; NaN if a shifted logit is not finite
  double mean;       // of Statistics.rows: sum of e shifted / total; of Divergence.p: the mean of
                     // shifted_p - shifted_q; of others 0
} Softmax;

typedef struct {
  const float *logits;
  long ld;                   // floats from one row to the next
  int n;
  int v;
  float temperature;
  const uint8_t *eligible;   // [n][v]; NULL: all
  const int64_t *targets;    // [n]
  Softmax *rows;             // [n], written by the forward pass and read by the backward pass
  float *logprobs;           // results [n]
  float *entropies;
  float *squares;            // sum of p^2
  float *cumulative;         // probability of the tokens at least as likely as the target, itself included,
                             // ties by id; NaN if the target is not eligible; NULL: not wanted
  const float *d_logprobs;   // of the backward pass [n]
  const float *d_entropies;
  float *gradient;           // [n][v]
} Statistics;

// What follows the head: z = z / divisor, then, unless cap is 0, z = cap tanh(z / cap)
typedef struct {
  float *logits;          // [n][v], changed in place; the backward pass reads them only if there is a cap
  int n;
  int v;
  float divisor;
  float cap;
  const float *d_logits;  // of the backward pass [n][v], from the changed logits
  float *gradient;        // [n][v]
} LogitScale;

typedef struct {
  const float *p_logits;
  long p_ld;
  const float *q_logits;
  long q_ld;
  int n;
  int v;
  float temperature;
  const uint8_t *eligible;  // [n][v]; NULL: all
  Softmax *p;               // [n], as `rows` above
  Softmax *q;
  float *out;               // the result [n]
  const float *seed;        // of the backward pass [n]
  float *gradient;          // [n][v], in the logits of p
} Divergence;

// Top-k and top-p
typedef struct {
  const float *scaled;    // [n][v], logits / temperature
  const int64_t *order;   // [n][v], tokens by falling logit
  int n;
  int v;
  int top_k;              // 0: no limit
  double top_p;
  uint8_t *eligible;      // results [n][v]
  int *rank;              // [n][v]
  float *log_kept;        // [n], ln of the kept mass
} Cut;

typedef struct {
  const int64_t *seeds;      // [n]
  const int64_t *positions;  // [n]
  int n;
  int columns;
  double *out;               // [n][columns]
} Noise;

typedef struct {
  const float *logits;
  long ld;                   // floats from one row to the next
  int n;
  int v;
  float temperature;
  const int64_t *seeds;      // [n]
  const int64_t *positions;  // [n]
  const uint8_t *eligible;   // [n][v], which tokens may be sampled; NULL: all
  const int *columns;        // [n][v], a token's column of the noise. NULL if `eligible` is: then its id
  int64_t *tokens;           // results [n]
  float *logprobs;           // of the softmax over all tokens
  Softmax *rows;             // [n], written: the softmax over all tokens
} Sampling;

// --------------------------------------------------------------------------------------------- the optimizer

// A parameter of n numbers, its gradient and its moments
typedef struct {
  float *p;
  const float *g;
  float *m;
  float *v;
  long n;
  double square;   // sum of g^2, written by gradient_squares
} Trained;

// Constants of a step, computed in float64, each rounded once to float32
typedef struct {
  float clip;    // min(1, largest norm / norm)
  float beta1;
  float rest1;   // 1 - beta1
  float beta2;
  float rest2;   // 1 - beta2
  float keep;    // 1 - learning rate x weight decay
  float rate;    // learning rate / (1 - beta1^t)
  float unroot;  // 1 / sqrt(1 - beta2^t)
  float eps;
} Step;

// -------------------------------------------------------------------------------------------------- failures

typedef struct {
  long count;      // calls that failed, since the library was loaded
  int of_memory;   // whether the last one found memory full; otherwise a GPU refused an operation
  char text[512];  // the reason, in one line
} Failure;

// ----------------------------------------------------------------------------------------- functions by file

// failure.c
const Failure *last_failure(void);

// operations.c: begins a call, on the thread of the call; on a GPU, on torch's stream
void begin_call(void *stream);

// threads.c
int set_threads(int threads);
void forget_workers(void);

// scratch.c, memory.c
void free_scratch(void);
void trim_heap(void);

// linear.c
long panel_floats(int n, int k, Precision precision);
void pack(Matrix *m);
void linear(const Matrix *w, const float *x, int rows, const float *residual, float *y);

// steps.c
void linear_backward(const Matrix *w, const float *dy, const float *x, int rows, const int *sequence,
                     const int *position, const int *slots, const Sums *sums, float *dx);

// saved.c
long kept_floats(const Model *m, long tokens, Keep keep);

// model.c
int model_forward(const Model *m, const Batch *b, float *kept, Keep keep, float *hidden);
void model_backward(const Model *m, const Batch *b, float *kept, Keep keep, const float *d_hidden,
                    const Sums *sums);
void copy_prefix(const Model *m, float *keys, float *values, long capacity, long from, long to,
                 int positions);

// validity.c: NULL, or "FIELD: RULE" for a model that breaks a rule on which the kernels rely
const char *model_fault(const Model *m);

// tokens.c: an int is 0 if a row of logits is not finite
void scale_logits(const LogitScale *a);
void scale_logits_gradient(const LogitScale *a);
int token_statistics(const Statistics *a);
void token_statistics_gradient(const Statistics *a);
int kl_divergence(const Divergence *a);
void kl_divergence_gradient(const Divergence *a);
int cut_tokens(const Cut *a);
void normal_noise(const Noise *a);
int sample_tokens(const Sampling *a);

// optimizer.c
void join_sums(const Sums *sums, long n);
double gradient_squares(Trained *tensors, int count, double *stretches);
void adamw(const Trained *tensors, int count, const Step *step);

// rounding.c
void round_tensor(NumberFormat format, int scaled, float *x, long rows, long n);

// elementwise.c: y_i = f(x_i)
void exp_float32(const float *x, float *y, long n);
void sigmoid_float32(const float *x, float *y, long n);
void tanh_float32(const float *x, float *y, long n);
void erf_float32(const float *x, float *y, long n);
void exp_float64(const double *x, double *y, long n);
void log_float64(const double *x, double *y, long n);
void sigmoid_float64(const double *x, double *y, long n);
void softplus_float64(const double *x, double *y, long n);
void sin_cos_float64(const double *x, double *sine, double *cosine, long n);

// checks.c
uint64_t known_answer(Precision precision);
uint32_t denormal_product(void);

// rows.c: sum of a b before it is rounded to float32, for the tests
double row_dot(const float *a, const float *b, int n);
