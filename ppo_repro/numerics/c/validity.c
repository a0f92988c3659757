// Rules that a model must follow. Kernels rely on these rules without checking them again. So Python calls
// `model_fault` before it passes a Model to any other kernel.
#include "kernels.h"

#define TEXT(number) TEXT_OF(number)
#define TEXT_OF(digits) #digits

INLINE int within(long value, long least, long most) { return least <= value && value <= most; }
INLINE int is_positive(float x) { return x > 0 && x <= 3.402823466e38f; }  // false for NaN
INLINE int has_shape(const Matrix *w, long n, long k) { return w->n == n && w->k == k; }

// Returns whether the `count` heads from element `at` on, `step` apart, lie within a row of `width` elements
INLINE int heads_fit(const Model *m, int count, int at, int step, long width) {
  return at >= 0 && step >= m->head_dim && at + (count - 1L) * step + m->head_dim <= width;
}

INLINE int is_activation(ActivationKind kind) {
#define KNOWN(kind, value, slope) \
  case kind: return 1;
  switch (kind) { ACTIVATIONS(KNOWN) }
  return 0;
}

// Up and down projection of an MLP or of one expert
static int mlp_fits(const Model *m, const Matrix *up, const Matrix *down) {
  return within(down->k, 1, MAX_WIDTH) && has_shape(up, (m->gated ? 2L : 1L) * down->k, m->hidden) &&
         has_shape(down, m->hidden, down->k);
}

static const char *rotary_fault(const Rotary *r, int head_dim) {
  if (!r->elements && !r->cosine && !r->sine) return NULL;  // a layer without rotary positions
  if (r->elements % 2 || !within(r->elements, 2, head_dim))
    return "head_dim: rotary positions turn pairs, so an even number of a head's elements, from 2 to all, "
           "must rotate";
  return r->cosine && r->sine ? NULL : "rope_parameters: there are no tables of cosine and sine";
}

static const char *layer_fault(const Model *m, const Layer *l, int mixture) {
  long q = (long)m->heads * m->head_dim, qkv = q + 2L * m->kv_heads * m->head_dim;
  if (!has_shape(&l->qkv, qkv, m->hidden))
    return "hidden_size: the matrix of queries, keys and values has another shape";
  if (!has_shape(&l->out, m->hidden, q))
    return "hidden_size: the output matrix of attention has another shape";
  if (l->window < 0) return "sliding_window: must be at least 1 key";
  if (!is_positive(l->scale)) return "head_dim: the scale of attention's scores must be finite and above 0";
  if (l->score_cap && !is_positive(l->score_cap))
    return "attn_logit_softcapping: must be finite and above 0";
  const char *fault = rotary_fault(&l->rotary, m->head_dim);
  if (fault) return fault;
  if (!l->expert_up)
    return mlp_fits(m, &l->up, &l->down) ? NULL : "intermediate_size: a matrix of an MLP has another shape";
  if (l->mixture != mixture) return "num_experts: the layers with experts are not counted in order";
  if (!has_shape(&l->router, m->experts, m->hidden))
    return "num_experts: the matrix of a router has another shape";
  for (int e = 0; e < m->experts; e++)
    if (!mlp_fits(m, &l->expert_up[e], &l->expert_down[e]))
      return "num_experts: a matrix of an expert has another shape";
  for (int e = 1; e < m->experts; e++)
    if (l->expert_down[e].k != l->expert_down[0].k)
      return "num_experts: the experts of a layer have different widths";
  return NULL;
}

// NULL for a model that the kernels can compute; else "FIELD: RULE", the field by its name in transformers.
const char *model_fault(const Model *m) {
  if (!within(m->layers, 1, MAX_LAYERS)) return "num_hidden_layers: must be from 1 to " TEXT(MAX_LAYERS);
  if (!within(m->hidden, 1, MAX_WIDTH)) return "hidden_size: must be from 1 to " TEXT(MAX_WIDTH);
  if (!within(m->vocabulary, 1, MAX_VOCABULARY)) return "vocab_size: must be from 1 to " TEXT(MAX_VOCABULARY);
  if (!within(m->heads, 1, MAX_WIDTH)) return "num_attention_heads: must be from 1 to " TEXT(MAX_WIDTH);
  if (!within(m->head_dim, 1, MAX_WIDTH / m->heads))
    return "head_dim: must be at least 1, and all heads together at most " TEXT(MAX_WIDTH);
  if (!within(m->kv_heads, 1, m->heads) || m->heads % m->kv_heads)
    return "num_key_value_heads: must divide num_attention_heads";
  if (!within(m->position_entries, 0, MAX_VOCABULARY))
    return "max_position_embeddings: must be from 1 to " TEXT(MAX_VOCABULARY);
  if (!within(m->padding, -1, m->vocabulary - 1L)) return "pad_token_id: must be a token of the vocabulary";
  if (!is_positive(m->eps)) return "eps of the norms: must be finite and above 0";
  if (!is_positive(m->embedding_scale))
    return "hidden_size: the scale of embeddings must be finite and above 0";
  if (!is_positive(m->residual_scale)) return "residual_multiplier: must be finite and above 0";
  if (!within(m->norm, NORM_RMS, NORM_LAYER) || !within(m->qk_norm, QK_NORM_NONE, QK_NORM_WHOLE) ||
      !within(m->head_norm, NORM_RMS, NORM_RMS_OFFSET))
    return "model_type: its kind of norm is not known";
  if (!is_activation(m->activation)) return "hidden_act: is not known";
  if (!within(m->mixtures, 0, m->layers)) return "num_experts: more layers have experts than there are";
  if (m->mixtures && !within(m->experts, 1, MAX_EXPERTS))
    return "num_experts: must be from 1 to " TEXT(MAX_EXPERTS);
  if (m->mixtures && !within(m->chosen, 1, m->experts))
    return "num_experts_per_tok: must be from 1 to the number of experts";
  long qkv = (m->heads + 2L * m->kv_heads) * m->head_dim;
  int queries_fit = heads_fit(m, m->heads, m->q_at, m->q_step, qkv);
  int keys_fit = heads_fit(m, m->kv_heads, m->k_at, m->k_step, qkv);
  int values_fit = heads_fit(m, m->kv_heads, m->v_at, m->v_step, qkv);
  if (!queries_fit || !keys_fit || !values_fit)
    return "num_attention_heads: queries, keys and values do not lie within a row";
  int mixtures = 0;
  for (int i = 0; i < m->layers; i++) {
    const char *fault = layer_fault(m, &m->layer[i], mixtures);
    if (fault) return fault;
    mixtures += m->layer[i].expert_up != NULL;
  }
  return mixtures == m->mixtures ? NULL : "num_experts: the layers with experts are not counted in order";
}
