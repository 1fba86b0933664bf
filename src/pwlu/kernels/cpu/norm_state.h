/* Compute the norm of a batch from its moments, and update the state of the norm, for one REAL. */

/* Write the norm of channel c, as reference.normalization computes it. */
static void FOR_REAL(write_norm)(const job *j, int64_t c, double mean, double variance) {
    const REAL *gamma = j->parameters[0], *beta = j->parameters[1];
    const double inv_std = 1 / sqrt(variance + j->eps);
    REAL *norm = (REAL *)j->gradients[4] + c;
    norm[0] = (REAL)mean, norm[j->channels] = (REAL)inv_std;
    norm[2 * j->channels] = (REAL)(gamma ? gamma[c] * inv_std : inv_std), norm[3 * j->channels] = beta ? beta[c] : 0;
}

/* Write the norm of channel c from its moments, and update the running statistics, the number of batches and the pool. */
static void FOR_REAL(finish_norm)(job *j, int64_t c, double mean, double m2) {
    const double count = (double)(j->outer * j->inner), variance = m2 / count, kept = 1 - j->factor;
    REAL *running_mean = j->gradients[1], *running_variance = j->gradients[2];
    if (running_mean) running_mean[c] = (REAL)(kept * running_mean[c] + j->factor * mean);
    if (running_variance)
        running_variance[c] = (REAL)(kept * running_variance[c] + j->factor * (m2 / (count > 1 ? count - 1 : 1)));
    if (c == 0 && j->gradients[3]) ++*(int64_t *)j->gradients[3];
    FOR_REAL(write_norm)(j, c, mean, variance);
    const REAL *norm = (const REAL *)j->gradients[4] + c;
    const double gain = norm[2 * j->channels]; /* apart from eps, z has mean beta and standard deviation gamma */
    if (j->gradients[0]) FOR_REAL(add_to_pool)(j, c, norm[3 * j->channels], (REAL)(m2 * gain * gain));
}

/* Compute the moments of channel c from its sums. Write its norm, or without a norm add the moments to the pool. */
static void FOR_REAL(finish_moments)(job *j, int64_t c) {
    const double *total = FOR_REAL(total)(j, c), mean = total[0] / (double)(j->outer * j->inner);
    const double m2 = total[1] - total[0] * mean;
    const REAL shift = ((REAL *)j->left)[first_position(j, c)];
    if (j->gradients[4]) FOR_REAL(finish_norm)(j, c, shift + mean, m2 < 0 ? 0 : m2);
    else FOR_REAL(add_to_pool)(j, c, (REAL)(shift + mean), (REAL)(m2 < 0 ? 0 : m2));
}
