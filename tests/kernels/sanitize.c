/* Calls every function of cpu.c with arrays of exactly the right size and wild contents; built with sanitizers. */
#include "cpu.c"

#include <stdio.h>

static uint64_t state = 1;
static uint64_t any(void) { return state = state * 6364136223846793005u + 1442695040888963407u, state >> 11; }

/* A mixture of ordinary numbers and arbitrary bits: infinities, NaN, denormals, values whose index overflows. */
static void *elements(int dtype, size_t n) {
  static const size_t sizes[] = {4, 8, 2, 2};
  unsigned char *p = malloc(n * sizes[dtype]);
  for (size_t i = 0; i < n * sizes[dtype]; i += 2) {
    const uint16_t bits = (uint16_t)any();
    memcpy(p + i, &bits, 2);
  }
  for (size_t i = 0; i < n; i++)
    if (any() % 2) {
      const double value = (double)(any() % 10000) / 1000 - 5;
      const float f = (float)value;
      const uint16_t b = to_bfloat16(f);
      memcpy(p + i * sizes[dtype],
             dtype == FLOAT64   ? (const void *)&value
             : dtype == FLOAT32 ? (const void *)&f
                                : (const void *)&b,
             sizes[dtype]);
    }
  return p;
}

/* Runs the worker more often than there is work for, as threads that come late do. */
static void in_turn(void (*worker)(void *), void *data, unsigned threads, unsigned flags) {
  (void)flags;
  for (unsigned i = 0; i <= threads; i++) worker(data);
}

int main(void) {
  const int64_t shapes[][3] = {{1, 1, 1},  {1, 1, 5000},  {3, 5, 100},  {2, 3, 4099}, {70, 33, 1}, {9, 700, 1},
                               {40, 6, 3}, {1, 1, 70001}, {900, 50, 2}, {40, 512, 1}, {37, 9, 1},  {3, 40, 20}};
  const int64_t intervals[] = {1, 2, 14, 16, 31, 64, 65, 200};
  int checked = 0;
  for (int dtype = 0; dtype < 4; dtype++)
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
      for (size_t k = 0; k < sizeof intervals / sizeof *intervals; k++)
        for (unsigned threads = 1; threads < 6; threads += 4) {
          const int64_t o = shapes[s][0], c = shapes[s][1], i = shapes[s][2], n = intervals[k];
          const size_t size = (size_t)(o * c * i), cs = (size_t)c, entries = (size_t)(c * (n + 2));
          const int real = dtype == FLOAT64 ? FLOAT64 : FLOAT32;
          void *x = elements(dtype, size), *g = elements(dtype, size), *y = elements(dtype, size);
          void *p[5] = {elements(real, cs), elements(real, cs), elements(real, (size_t)(c * (n + 1))), elements(real, cs),
                        elements(real, cs)};
          void *d[5] = {elements(real, cs), elements(real, cs), elements(real, (size_t)(c * (n + 1))), elements(real, cs),
                        elements(real, cs)};
          void *slopes = elements(real, entries), *offsets = elements(real, entries);
          void *pool = elements(real, 3 * cs), *norm = elements(real, 4 * cs), *sums = elements(real, 3 * cs),
               *r = elements(dtype, size);
          void *weight = elements(real, (size_t)(c * (n + 5))), *grad_weight = elements(real, (size_t)(c * (n + 5)));
          int64_t batches = 0;
          int bad = pwlu_forward(in_turn, threads, dtype, x, y, o, c, i, n, p[0], p[1], p[2], p[3], p[4]);
          bad |= pwlu_lookup(in_turn, threads, dtype, x, y, o, c, i, n, p[0], p[1], slopes, offsets);
          bad |= pwlu_backward(in_turn, threads, dtype, g, x, y, o, c, i, n, p[0], p[1], p[2], p[3], p[4], d[0], d[1], d[2],
                               d[3], d[4]);
          bad |= pwlu_backward(in_turn, threads, dtype, g, x, NULL, o, c, i, n, p[0], p[1], p[2], p[3], p[4], d[0], d[1], d[2],
                               d[3], d[4]);
          bad |= pwlu_backward(in_turn, threads, dtype, g, x, y, o, c, i, n, p[0], p[1], p[2], p[3], p[4], NULL, NULL, NULL,
                               NULL, NULL);
          void *knots = elements(real, (size_t)(c * (2 * n + 4))), *grad_knots = elements(real, (size_t)(c * (2 * n + 4)));
          bad |= pwlu_nonuniform_forward(in_turn, threads, dtype, x, y, o, c, i, n, knots);
          bad |= pwlu_nonuniform_backward(in_turn, threads, dtype, g, x, y, o, c, i, n, knots, grad_knots);
          bad |= pwlu_nonuniform_backward(in_turn, threads, dtype, g, x, NULL, o, c, i, n, knots, grad_knots);
          bad |= pwlu_nonuniform_backward(in_turn, threads, dtype, g, x, y, o, c, i, n, knots, NULL);
          bad |= pwlu_moments(in_turn, threads, dtype, x, o, c, i, pool);
          for (int k = 0; k < 2; k++) {
            void *none = NULL, *maybe = k ? pool : none, *added = k ? r : none;
            bad |= pwlu_normalization(in_turn, threads, dtype, k ? x : none, o, c, i, k ? p[0] : none, k ? p[1] : none, p[3],
                                      p[4], k ? &batches : none, 0.1, 1e-5, maybe, norm);
            bad |= pwlu_norm_forward(in_turn, threads, dtype, x, added, y, o, c, i, norm, n, weight, maybe);
            bad |= pwlu_norm_backward(in_turn, threads, dtype, g, x, added, k ? y : none, o, c, i, norm, sums, n, weight,
                                      grad_weight);
            bad |= pwlu_norm_input(in_turn, threads, dtype, g, x, y, o, c, i, norm, sums, (double)(o * i), k, n, weight);
            bad |= pwlu_norm_input(in_turn, threads, dtype, g, x, y, o, c, i, norm, NULL, 0, k, n, weight);
          }
          if (bad) return 1;
          for (int q = 0; q < 5; q++) free(p[q]), free(d[q]);
          free(knots), free(grad_knots), free(x), free(g), free(y), free(slopes), free(offsets), free(pool), free(norm),
              free(sums), free(r), free(weight), free(grad_weight);
          checked++;
        }
  printf("checked %d problems\n", checked);
  return 0;
}
